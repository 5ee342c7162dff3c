// Files of the scenario.

import { request } from './api.js';

async function save(kind, scenario) {
  const response = await request(`/api/download/${kind}`, scenario);
  const name = /filename="([^"]+)"/.exec(response.headers.get('content-disposition'))[1];
  const link = document.createElement('a');
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function offerDownloads(scenario, failed) {
  document.getElementById('downloads').addEventListener('click', async ({ target }) => {
    const kind = target.id === 'emit' ? document.getElementById('tool').value : target.dataset.download;
    if (!kind) return;
    target.disabled = true;
    await save(kind, scenario()).catch(failed);
    target.disabled = false;
  });
}
