// Scenarios that were kept, up to four, side by side.

import { ask } from './api.js';
import { remember, state } from './state.js';

const MOST = 4;

export class Kept {
  constructor(section, failed, take) {
    this.section = section;
    this.failed = failed;
    this.take = take;
  }

  keep(scenario) {
    if (state.kept.length === MOST) {
      this.failed({ message: `Up to ${MOST} scenarios can be kept; drop one first.` });
      return;
    }
    const taken = new Set(state.kept.map((one) => one.name));
    const name = ['A', 'B', 'C', 'D'].find((letter) => !taken.has(letter));
    state.kept.push({ name, scenario: structuredClone(scenario) });
    this.show();
    this.section.scrollIntoView({ block: 'nearest' });
  }

  async show() {
    this.section.hidden = state.kept.length === 0;
    this.section.querySelector('#kept').replaceChildren(...state.kept.map((one) => this.chip(one)));
    remember();
    if (!state.kept.length) return;
    const body = this.section.querySelector('.body');
    const width = Math.min(2000, Math.max(240, body.clientWidth));
    try {
      body.innerHTML = (await ask('/api/compare', { kept: state.kept, width })).html;
    } catch (mistake) {
      this.failed(mistake);
    }
  }

  chip(one) {
    const chip = Object.assign(document.createElement('span'), { className: 'chip' });
    const name = Object.assign(document.createElement('input'), { value: one.name, size: 10, maxLength: 40 });
    name.ariaLabel = `name of scenario ${one.name}`;
    name.addEventListener('change', () => { one.name = name.value.trim() || one.name; this.show(); });
    const open = Object.assign(document.createElement('button'), { type: 'button', textContent: 'open' });
    open.ariaLabel = `open scenario ${one.name}`;
    open.addEventListener('click', () => this.take(structuredClone(one.scenario)));
    const drop = Object.assign(document.createElement('button'), { type: 'button', textContent: '✕' });
    drop.ariaLabel = `drop scenario ${one.name}`;
    drop.addEventListener('click', () => { state.kept.splice(state.kept.indexOf(one), 1); this.show(); });
    chip.append(name, open, drop);
    return chip;
  }
}
