// Panels: HTML from the server. Quick ones come with each view; slow ones are asked for one at a time, and again
// while the scenario has changed since.

import { ask } from './api.js';

export class Panels {
  constructor(root, scenario, failed) {
    this.scenario = scenario;
    this.failed = failed;
    this.all = new Map([...root.querySelectorAll('[data-panel]')].map((one) => [one.dataset.panel, one]));
    this.dirty = new Set();
    this.busy = false;
    this.draft = false;
    this.options = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) target.inView = isIntersecting;
      this.next();
    }, { rootMargin: '250px' });
    for (const section of this.all.values()) this.seen.observe(section);
    root.addEventListener('change', ({ target }) => {
      if ('log' in target.dataset) this.redraw(target.closest('[data-panel]').dataset.panel);
    });
  }

  width(name) {
    const body = this.all.get(name).querySelector('.body');
    const columns = getComputedStyle(body).gridTemplateColumns.split(' ').map(parseFloat);
    const width = columns[0] > 0 ? columns[0] : body.clientWidth;
    return Math.round(Math.min(2000, Math.max(240, width)));
  }

  quick() {
    return [...this.all].filter(([, section]) => 'quick' in section.dataset).map(([name]) => name);
  }

  draw(name, html) {
    const section = this.all.get(name);
    const body = section.querySelector('.body');
    const open = [...body.querySelectorAll('details')].map((one) => one.open);
    body.innerHTML = html;
    body.querySelectorAll('details').forEach((one, i) => { one.open = open[i] ?? one.open; });
    section.classList.remove('stale');
  }

  stale(name, on = true) { this.all.get(name)?.classList.toggle('stale', on); }

  // All slow panels are out of date.
  outdated(draft) {
    this.draft = draft;
    for (const [name, section] of this.all) {
      if ('quick' in section.dataset || 'manual' in section.dataset) continue;
      this.dirty.add(name);
    }
    this.next();
  }

  redraw(name) {
    this.dirty.add(name);
    this.next();
  }

  async next() {
    const name = [...this.dirty].find((each) => this.all.get(each).inView);
    if (this.busy || !name || !this.scenario()) return;
    this.busy = true;
    this.dirty.delete(name);
    const section = this.all.get(name);
    section.setAttribute('aria-busy', 'true');
    try {
      const log = section.querySelector('[data-log]')?.checked ?? false;
      const options = { draft: this.draft, log, ...this.options.get(name) };
      const body = { scenario: this.scenario(), width: this.width(name), ...options };
      const { html, problem } = await ask(`/api/panel/${name}`, body);
      if (html !== undefined) this.draw(name, html);
      else this.stale(name);
      if (problem) section.title = problem.message; else section.removeAttribute('title');
    } catch (mistake) {
      this.stale(name);
      this.failed(mistake);
    }
    section.removeAttribute('aria-busy');
    this.busy = false;
    requestAnimationFrame(() => this.next());
  }
}
