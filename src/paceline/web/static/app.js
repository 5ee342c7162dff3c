// The explorer: a scenario, its controls, its panels. The server computes; the newest change wins.

import { ask } from './api.js';
import { Controls } from './controls.js';
import { Panels } from './panels.js';
import { Kept } from './kept.js';
import { Search } from './search.js';
import { Window } from './window.js';
import { offerDownloads } from './downloads.js';
import { remember, restore, state, toFragment } from './state.js';

const $ = (id) => document.getElementById(id);
const changes = new Map();
let asking = false;
let dragging = false;

const controls = new Controls($('controls'), (path, value, draft) => {
  dragging = draft;
  change(path, value);
});
const panels = new Panels($('answers'), () => state.scenario, problem);

const kept = new Kept($('compare'), problem, (scenario) => { state.scenario = scenario; refresh(); });
new Search($('search'), () => state.scenario, problem);
new Window($('timeline'), (window) => { panels.options.set('timeline', window); panels.redraw('timeline'); });
offerDownloads(() => state.scenario, problem);

export function change(path, value) {
  changes.delete(path);
  changes.set(path, value);
  if (!asking) refresh();
}

// Asks for the scenario with all changes so far; what changes meanwhile is asked for next.
export async function refresh() {
  asking = true;
  $('answers').ariaBusy = 'true';
  const sent = [...changes].map(([path, value]) => ({ path, value }));
  changes.clear();
  try {
    const body = { scenario: state.scenario, changes: sent, width: panels.width('time'), panels: panels.quick() };
    show(await ask('/api/view', body));
  } catch (mistake) {
    problem(mistake);
  }
  asking = false;
  if (changes.size) refresh();
  else $('answers').ariaBusy = 'false';
}

function show(view) {
  state.scenario = view.scenario;
  for (const input of document.querySelectorAll('#subject [data-path]')) {
    const value = view.scenario[input.dataset.path];
    const typing = input === document.activeElement && input.value !== input.dataset.shown;
    if (!typing) input.value = input.dataset.shown = value;
  }
  if (view.controls) controls.show(view.controls);
  $('command').textContent = view.command;
  $('reset').disabled = view.scenario.edits.length === 0;
  problem(view.problem ?? null);
  if (view.problem) return;
  for (const [name, html] of Object.entries(view.panels)) panels.draw(name, html);
  $('title').textContent = view.title;
  $('budget-unit').textContent = view.unit === 'tokens' ? 'tokens' : 'epochs';
  if (!dragging) $('status').textContent = view.summary;
  remember();
  panels.outdated(dragging);
}

// Says what is wrong and offers what could be taken instead; null: nothing is.
function problem(found) {
  const box = $('problem');
  box.hidden = !found;
  for (const name of panels.all.keys()) if (found) panels.stale(name);
  if (!found) return;
  const offers = (found.offers ?? []).map(({ path, value }) => {
    const button = Object.assign(document.createElement('button'), { type: 'button', className: 'take' });
    button.textContent = `Take ${path} ${value}`;
    Object.assign(button.dataset, { path, value });
    return button;
  });
  box.replaceChildren(Object.assign(document.createElement('div'), { textContent: found.message }), ...offers);
}

document.addEventListener('click', ({ target }) => {
  const button = target.closest?.('button.take');
  if (button) change(button.dataset.path, button.dataset.value);
});
$('subject').addEventListener('submit', (event) => event.preventDefault());
$('subject').addEventListener('change', ({ target }) => {
  target.dataset.shown = target.value;
  change(target.dataset.path, target.value);
});
$('reset').addEventListener('click', () => {
  state.scenario = { ...state.scenario, edits: [] };
  refresh();
});
$('link').addEventListener('click', async () => {
  history.replaceState(null, '', `#${toFragment()}`);
  await navigator.clipboard?.writeText(location.href).catch(() => {});
  $('status').textContent = 'The link is in the address bar and in the clipboard.';
});
$('theme').addEventListener('click', () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
});
$('keep').addEventListener('click', () => kept.keep(state.scenario));
$('device-form').addEventListener('submit', (event) => {
  event.preventDefault();
  for (const [path, value] of new FormData(event.target)) {
    if (value.trim()) change(path, path === 'device.arithmetic' ? `x${value.trim()}` : value.replace(/\s+/g, ''));
  }
});
$('upload').addEventListener('click', () => $('file').click());
$('file').addEventListener('change', async () => {
  const [file] = $('file').files;
  $('file').value = '';
  if (!file) return;
  try {
    change('model', (await ask('/api/upload', await file.text())).model);
  } catch (mistake) {
    problem(mistake);
  }
});
addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(refresh, 150); });
addEventListener('hashchange', () => { if (location.hash.slice(1) !== toFragment() && restore(location.hash.slice(1))) { refresh(); kept.show(); } });
let resized = 0;

async function start() {
  if (innerWidth <= 820) $('drawer').open = false;
  const catalog = await ask('/api/catalog');
  for (const [id, names] of [['models', catalog.models], ['clusters', catalog.clusters], ['devices', catalog.devices]]) {
    $(id).replaceChildren(...names.map((value) => Object.assign(document.createElement('option'), { value })));
  }
  if (!restore(location.hash.slice(1))) state.scenario = catalog.first.scenario;
  await refresh();
  kept.show();
}

start().catch(problem);
