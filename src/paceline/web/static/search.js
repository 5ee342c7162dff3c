// The search for the best plan: started, followed, stopped.

import { ask } from './api.js';

const EVERY_MS = 250;

export class Search {
  constructor(section, scenario, failed) {
    this.find = (selector) => section.querySelector(selector);
    this.scenario = scenario;
    this.failed = failed;
    this.find('#search-start').addEventListener('click', () => this.start());
    this.find('#search-stop').addEventListener('click', () => this.stop());
  }

  async start() {
    try {
      const asked = { scenario: this.scenario(), objective: this.find('#objective').value };
      this.follow(await ask('/api/search', asked));
    } catch (mistake) {
      this.failed(mistake);
    }
  }

  async stop() {
    this.find('#search-stop').disabled = true;
    await ask(`/api/search/${this.id}`, undefined, 'DELETE').catch(this.failed);
  }

  async follow(status) {
    this.id = status.id;
    const running = status.state === 'running';
    this.find('#search-start').disabled = running;
    this.find('#search-stop').disabled = !running || status.doing === 'stopping';
    this.progress(status, running);
    try {
      if (running) setTimeout(async () => this.follow(await ask(`/api/search/${this.id}`)), EVERY_MS);
      else if (status.problem) this.find('.body').textContent = status.problem.message;
      else await this.result();
    } catch (mistake) {
      this.failed(mistake);
    }
  }

  progress(status, running) {
    const bar = this.find('#search-bar');
    bar.hidden = !running;
    if (status.total) bar.value = status.done / status.total;
    else bar.removeAttribute('value');
    const far = status.total ? ` ${status.done.toLocaleString('en')} of ${status.total.toLocaleString('en')} plans` : '';
    const doing = running ? `${status.doing}${far}` : status.state;
    this.find('#search-state').textContent = `${doing}, ${status.elapsed_s.toFixed(0)} s`;
  }

  async result() {
    const body = this.find('.body');
    const width = Math.min(2000, Math.max(240, Math.round(body.clientWidth)));
    body.innerHTML = (await ask(`/api/search/${this.id}/result?width=${width}`, {})).html;
  }
}
