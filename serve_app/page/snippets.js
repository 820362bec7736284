// A request as a command line and as a program: what the page sends, but for the key, which stands in the environment.

import { hasKey } from './api.js';
import { copyText, flash, quietButton } from './dom.js';

const KEY = 'CALLBOARD_API_KEY';
const OPENAI_FIELDS = new Set([
  'model', 'messages', 'prompt', 'temperature', 'top_p', 'max_tokens', 'seed', 'stop', 'presence_penalty',
  'frequency_penalty', 'logit_bias', 'logprobs', 'stream', 'stream_options', 'tools', 'tool_choice',
]); // the others go into its client's extra_body

const urlOf = path => new URL(path, document.baseURI).href;

export function curl({ path, body }) {
  const key = hasKey() ? ` -H "Authorization: Bearer $${KEY}"` : '';
  return `curl -N ${urlOf(path)} -H 'Content-Type: application/json'${key} --data-binary @- <<'JSON'
${JSON.stringify(body, null, 2)}
JSON
`;
}

export function python({ path, body }) {
  const isChat = path.endsWith('chat/completions');
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${urlOf('v1')}", api_key=os.environ.get("${KEY}", "none"))
chunks = client.${isChat ? 'chat.completions' : 'completions'}.create(
${lines.join('\n')}
)
for chunk in chunks:
    if chunk.choices:
        print(chunk.choices[0].${isChat ? 'delta.content' : 'text'} or "", end="", flush=True)
${body.tools ? `        for call in chunk.choices[0].delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="", flush=True)
` : ''}print()
`;
}

/** Python's form of a value that came from JSON. */
function literal(value, indent) {
  const [inner, outer] = [' '.repeat(indent + 4), ' '.repeat(indent)];
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map(each => `${inner}${literal(each, indent + 4)},\n`).join('')}${outer}]` : '[]';
  }
  if (value !== null && typeof value === 'object') {
    const items = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, indent + 4)},\n`);
    return items.length ? `{\n${items.join('')}${outer}}` : '{}';
  }
  if (typeof value === 'string' || typeof value === 'number') return JSON.stringify(value);
  return { true: 'True', false: 'False', null: 'None' }[value];
}

/** Puts buttons that copy what `current()` gives into `menu`; without a request it gives null, with a faulty one it throws. */
export function startSnippets(menu, current) {
  const button = (label, write) => {
    const made = quietButton(label, async () => {
      try {
        const request = current();
        if (request) await copyText(write(request));
        flash(made, request ? 'Copied' : 'Write something first');
      } catch (error) {
        flash(made, error.message);
      }
    });
    made.ariaLabel = `Copy as ${label}`;
    made.title = 'The request on screen, as the page sends it';
    return made;
  };
  menu.append(button('curl', curl), button('Python', python));
}
