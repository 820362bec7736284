// Chats as files: JSON has all that is kept of them, Markdown is one chat to read. Both can be imported.

import { element } from './dom.js';
import { keep, loaded, pictureOf, urlOf } from './picture_store.js';
import { newId } from './store.js';

const FORMAT = 'callboard-chats';
const MARK = /^<!-- callboard: (question|picture|reasoning|answer)(?: (\{.*\}))? -->$/; // shows nowhere where Markdown is drawn
const PICTURE = /^data:image\/(png|jpeg|webp|gif|avif);base64,[\w+/]+=*$/;
const ESCAPED = /^(\\*)(<!-- callboard: )/gm; // such a line of a text itself

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Turns with their pictures' data; those that are not kept any more are left out. */
async function withPictures(turns) {
  await loaded(turns.flatMap(({ images = [] }) => images));
  return turns.map(({ images, ...turn }) =>
    images ? { ...turn, images: images.filter(urlOf).map(picture => ({ name: picture.name, url: urlOf(picture) })) } : turn);
}

export async function asJson(chats) {
  const whole = await Promise.all(chats.map(async chat => ({ ...chat, turns: await withPictures(chat.turns) })));
  return JSON.stringify({ format: FORMAT, version: 1, chats: whole }, null, 2) + '\n';
}

export async function asMarkdown({ turns }) {
  const part = (kind, title, text, facts) =>
    `<!-- callboard: ${kind}${facts ? ` ${JSON.stringify(facts).replaceAll('-->', '--\\u003e')}` : ''} -->\n${title}\n\n${text.replace(ESCAPED, '\\$1$2')}\n`;
  return (await withPictures(turns)).flatMap(({ question, images = [], reasoning, text, ...facts }) => [
    part('question', '## You', question),
    ...images.map(({ name, url }) => part('picture', '', `![${name.replace(/[[\]\\]/g, '')}](${url})`)),
    ...(reasoning ? [part('reasoning', '### Reasoning', reasoning)] : []),
    part('answer', '## Answer', text, facts),
  ]).join('\n');
}

/** The chats of an exported file. Throws if it is none. */
export function imported(text) {
  const chats = text.trimStart().startsWith('{') ? ofJson(text) : [{ turns: ofMarkdown(text) }];
  const isFit = ({ turns }) => Array.isArray(turns) && turns.length > 0 &&
    turns.every(turn => isText(turn?.question) && isText(turn.text));
  if (!Array.isArray(chats) || !chats.length || !chats.every(chat => chat && isFit(chat))) {
    throw new Error('The file has no chats of this page; choose one that it exported.');
  }
  return chats.map(({ title, at, turns }) => ({
    id: newId(), ...(isText(title) && { title }), ...(Number.isFinite(at) && { at }), turns: turns.map(sound),
  }));
}

const isText = value => typeof value === 'string';

/** An answer without what the page cannot show. */
function sound({ request, calls, other, images, ...turn }) {
  const isRequest = request && typeof request.fields === 'object' && request.fields;
  const isCall = call => call && [call.id, call.name, call.arguments, call.result ?? ''].every(isText);
  const pictures = (Array.isArray(images) ? images : [])
    .filter(picture => PICTURE.test(picture?.url)).map(({ url, name }) => pictureOf(url, String(name)));
  keep(pictures);
  return {
    ...turn,
    ...(pictures.length && { images: pictures }),
    reasoning: isText(turn.reasoning) ? turn.reasoning : '',
    end: isText(turn.end) ? turn.end : '',
    ...(isRequest && { request }),
    ...(Array.isArray(calls) && calls.length && calls.every(isCall) && { calls }),
    ...(isRequest && isText(other?.text) && other.request?.fields && { other: sound(other) }),
  };
}

function ofJson(text) {
  try {
    const { format, chats } = JSON.parse(text);
    return format === FORMAT ? chats : null;
  } catch {
    return null;
  }
}

function ofMarkdown(text) {
  const turns = [];
  let [part, lines] = [null, []];
  const close = () => {
    if (!part) return;
    const content = lines.slice(2).join('\n').replace(/\n$/, '').replace(/^\\(\\*<!-- callboard: )/gm, '$1'); // a title and a blank line are first
    const name = part.kind === 'answer' ? 'text' : part.kind;
    if (part.kind === 'question') turns.push({ question: content, reasoning: '', text: '', end: '' });
    else if (turns.length && part.kind === 'picture') {
      const [, name, url] = content.match(/^!\[(.*?)\]\((.*)\)$/m) ?? [];
      (turns.at(-1).images ??= []).push({ name, url });
    } else if (turns.length) Object.assign(turns.at(-1), part.facts, { [name]: content });
  };
  for (const line of text.replaceAll('\r\n', '\n').split('\n')) {
    const found = line.match(MARK);
    if (!found) {
      lines.push(line);
      continue;
    }
    close();
    [part, lines] = [{ kind: found[1], facts: found[2] ? factsOf(found[2]) : {} }, []];
  }
  close();
  return turns;
}

function factsOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
