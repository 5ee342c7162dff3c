// Requests to the server this page came from. A mistake is an Error with `offers`: what could be taken instead.

export class Mistake extends Error {
  constructor(problem) {
    super(problem.message);
    this.offers = problem.offers ?? [];
  }
}

export async function request(path, body, method = body === undefined ? 'GET' : 'POST') {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.headers['content-type'] = 'application/json';
    options.body = typeof body === 'string' ? body : JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Mistake({ message: 'The server does not answer: is paceline explore still running?' });
  }
  if (response.ok) return response;
  throw new Mistake(await response.json().catch(() => ({ message: `The server answered ${response.status}` })));
}

export const ask = async (path, body, method) => (await request(path, body, method)).json();
