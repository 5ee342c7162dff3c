// The window of the timeline: buttons, arrow keys, or dragging over a stretch.

// Pixels left and right of the plotting area, as the server draws it.
const LEFT = 104, RIGHT = 14;
const NAMESPACE = 'http://www.w3.org/2000/svg';

export class Window {
  constructor(body, moved) {
    this.body = body;
    this.moved = moved;
    this.start = 0;
    this.end = 1;
    body.parentElement.addEventListener('click', ({ target }) => {
      if (target.dataset.zoom) this.step(target.dataset.zoom);
    });
    body.addEventListener('pointerdown', (event) => this.drag(event));
  }

  set(start, end) {
    const length = Math.min(1, Math.max(1e-5, end - start));
    this.start = Math.min(1 - length, Math.max(0, start));
    this.end = this.start + length;
    this.moved({ start: this.start, end: this.end });
  }

  step(where) {
    const length = this.end - this.start;
    const middle = (this.start + this.end) / 2;
    if (where === 'all') this.set(0, 1);
    if (where === 'in') this.set(middle - length / 4, middle + length / 4);
    if (where === 'out') this.set(middle - length, middle + length);
    if (where === 'left') this.set(this.start - length / 2, this.end - length / 2);
    if (where === 'right') this.set(this.start + length / 2, this.end + length / 2);
  }

  drag(event) {
    const svg = event.target.closest('svg');
    if (!svg || event.button) return;
    const box = svg.getBoundingClientRect();
    const share = (x) => Math.min(1, Math.max(0, (x - box.left - LEFT) / (box.width - LEFT - RIGHT)));
    const first = share(event.clientX);
    const shade = svg.appendChild(document.createElementNS(NAMESPACE, 'rect'));
    shade.setAttribute('class', 'selection');
    shade.setAttribute('height', box.height);
    const move = ({ clientX }) => {
      const [a, b] = [first, share(clientX)].sort((x, y) => x - y);
      shade.setAttribute('x', LEFT + a * (box.width - LEFT - RIGHT));
      shade.setAttribute('width', (b - a) * (box.width - LEFT - RIGHT));
    };
    const up = ({ clientX }) => {
      removeEventListener('pointermove', move);
      shade.remove();
      const [a, b] = [first, share(clientX)].sort((x, y) => x - y);
      const length = this.end - this.start;
      if (b - a > 0.005) this.set(this.start + a * length, this.start + b * length);
    };
    addEventListener('pointermove', move);
    addEventListener('pointerup', up, { once: true });
    event.preventDefault();
  }
}
