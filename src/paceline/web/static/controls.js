// Sliders and choices. The server says what each can be set to; moving one sends its path and value.

const GROUPS = { plan: 'Plan', cluster: 'Cluster', device: 'Device' };
const spaced = (text) => text.replace(/^([\d.]+)([A-Za-z$%]\S*)$/, '$1 $2');
const plain = (value) => value.replace(/^\w+=/, '') || '0 s';

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export class Controls {
  constructor(form, moved) {
    this.form = form;
    this.moved = moved;
    this.shape = '';
    this.shown = new Map();
    form.addEventListener('submit', (event) => event.preventDefault());
  }

  show(controls) {
    const shape = JSON.stringify(controls.map((c) => [c.path, c.label, c.values]));
    if (shape !== this.shape) this.build(controls);
    this.shape = shape;
    for (const control of controls) this.update(control);
  }

  build(controls) {
    const active = document.activeElement?.id;
    this.shown.clear();
    const sets = Object.entries(GROUPS).map(([group, title]) => element('fieldset', {},
      element('legend', { textContent: title }),
      ...controls.filter((control) => control.group === group).map((control) => this.make(control))));
    this.form.replaceChildren(...sets);
    if (active) document.getElementById(active)?.focus();
  }

  make(control) {
    const id = `c-${control.path}`;
    const label = element('label', { htmlFor: id, textContent: control.label });
    const row = element('div', { className: 'control' }, label);
    if (control.shown.length) row.append(this.choice(control, id));
    else row.append(this.slider(control, id), this.exact(control));
    this.shown.set(control.path, row);
    return row;
  }

  slider(control, id) {
    const range = element('input', { type: 'range', id, min: 0, max: control.values.length - 1, step: 1 });
    const value = () => control.values[range.value];
    range.addEventListener('input', () => { this.tell(range, value()); this.moved(control.path, value(), true); });
    range.addEventListener('change', () => this.moved(control.path, value(), false));
    return range;
  }

  // The text beside a slider takes any value; an empty one takes an edit back.
  exact(control) {
    const text = element('input', { type: 'text', ariaLabel: `${control.label}, exact value`, spellcheck: false });
    text.addEventListener('change', () => {
      const value = text.value.trim().replace(/\s+/g, '');
      const key = control.path.startsWith('plan.') ? control.path.slice(5) : '';
      this.moved(control.path, key && value && value !== 'auto' ? `${key}=${value}` : key ? '' : value, false);
    });
    return text;
  }

  choice(control, id) {
    const select = element('select', { id });
    control.values.forEach((value, i) => select.append(element('option', { value, textContent: control.shown[i] })));
    select.addEventListener('change', () => this.moved(control.path, select.value, false));
    return select;
  }

  tell(range, value) {
    range.ariaValueText = spaced(plain(value));
    const text = range.nextElementSibling;
    if (text) text.value = range.ariaValueText;
  }

  update(control) {
    const row = this.shown.get(control.path);
    row.classList.toggle('edited', control.edited);
    const input = row.querySelector('select, input[type=range]');
    if (control.shown.length) { input.selectedIndex = control.at; return; }
    const dragging = input.matches(':active');
    if (dragging) return;
    input.value = control.at;
    input.ariaValueText = spaced(control.value);
    const text = row.querySelector('input[type=text]');
    if (document.activeElement !== text) text.value = spaced(control.value);
  }
}
