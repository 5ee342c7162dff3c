// What the page shows: the scenario, scenarios kept to compare, and the link that restores both.

const PARTS = ['model', 'cluster', 'plan', 'budget'];

export const state = { scenario: null, kept: [] };

export function toLink(scenario) {
  const words = new URLSearchParams();
  for (const part of PARTS) if (scenario[part]) words.set(part, scenario[part]);
  for (const edit of scenario.edits) words.append('set', edit);
  return words.toString();
}

export function fromLink(text) {
  const words = new URLSearchParams(text);
  if (!words.get('model') || !words.get('cluster')) return null;
  const scenario = Object.fromEntries(PARTS.map((part) => [part, words.get(part) ?? '']));
  return { ...scenario, edits: words.getAll('set') };
}

// The whole page as the fragment of an address: the scenario, then those kept, each with its name.
export function toFragment() {
  const words = new URLSearchParams(toLink(state.scenario));
  for (const { name, scenario } of state.kept) words.append('keep', `${name}\n${toLink(scenario)}`);
  return words.toString();
}

export function restore(fragment) {
  const scenario = fromLink(fragment);
  if (!scenario) return false;
  state.scenario = scenario;
  state.kept = new URLSearchParams(fragment).getAll('keep').flatMap((text) => {
    const [name, link] = text.split('\n');
    const kept = fromLink(link ?? '');
    return kept ? [{ name, scenario: kept }] : [];
  });
  return true;
}

let waiting = 0;

// Browsers limit how often an address may change: it follows once things are at rest.
export function remember() {
  clearTimeout(waiting);
  waiting = setTimeout(() => history.replaceState(null, '', `#${toFragment()}`), 250);
}
