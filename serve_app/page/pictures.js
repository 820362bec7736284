// Pictures of a message: chosen, pasted or dropped, then shown with it and sent as they are. The server scales them down.

import { element, quietButton } from './dom.js';
import { loaded, pictureOf, urlOf } from './picture_store.js';

const KINDS = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/avif'];

/** What a turn's message has: its text, after its pictures if it has some. */
export function contentOf({ question, images = [] }) {
  const parts = images.filter(urlOf).map(picture => ({ type: 'image_url', image_url: { url: urlOf(picture) } }));
  return parts.length ? [...parts, ...(question ? [{ type: 'text', text: question }] : [])] : question;
}

/** A list of pictures; with `remove(picture)` each has a button. */
export function pictureList(pictures, remove) {
  return element('ul', { className: 'pictures', role: 'list', ariaLabel: 'Pictures' }, ...pictures.map(picture => {
    const shown = element('img', { alt: picture.name, title: picture.name });
    loaded([picture]).then(() => {
      if (urlOf(picture)) shown.src = urlOf(picture);
      else shown.replaceWith(element('span', { className: 'error' }, `“${picture.name}” is not kept any more.`));
    });
    return element('li', {}, shown, remove ? Object.assign(quietButton('×', () => remove(picture)), { ariaLabel: `Remove “${picture.name}”` }) : '');
  }));
}

/** The pictures of a message that is not sent yet. */
export class Tray {
  pictures = [];
  added = null; // a promise, done when all files are among the pictures

  /** `served()` has the model's card and the server's limits; `numSent()` is the number of pictures before the message. */
  constructor(served, numSent) {
    [this.served, this.numSent] = [served, numSent];
    this.element = element('div', { className: 'tray', hidden: true });
  }

  get takesImages() {
    return Boolean(this.served().architecture?.input_modalities.includes('image'));
  }

  add(files) {
    return (this.added = this.#add([...files]));
  }

  async #add(files) {
    const problems = [];
    for (const file of files) {
      const problem = this.#problem(file);
      if (problem) problems.push(problem);
      else this.pictures.push(pictureOf(await dataUrl(file), file.name));
    }
    this.show(this.pictures, [...new Set(problems)].join(' '));
  }

  /** Shows these pictures, and a sentence on what is wrong. */
  show(pictures, problem = '') {
    this.pictures = pictures;
    this.element.replaceChildren(
      pictureList(pictures, removed => this.show(this.pictures.filter(picture => picture !== removed))),
      problem ? element('p', { className: 'error', role: 'alert' }, problem) : '');
    this.element.hidden = !pictures.length && !problem;
  }

  /** Takes pictures that are pasted into `box`, dropped on `place`, or chosen in the file field `input`. */
  listen(box, place, input) {
    input.accept = KINDS.join();
    input.addEventListener('change', async () => {
      const added = this.add(input.files);
      input.value = '';
      await added;
      box.focus();
    });
    box.addEventListener('paste', event => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    const over = isOver => event => {
      if (!event.dataTransfer.types.includes('Files')) return;
      event.preventDefault();
      place.classList.toggle('dropping', isOver && this.takesImages);
      if (event.type === 'drop') this.add(event.dataTransfer.files);
    };
    place.addEventListener('dragover', over(true));
    for (const kind of ['dragleave', 'drop']) place.addEventListener(kind, over(false));
  }

  #problem({ name, type, size }) {
    const { max_images, max_image_bytes } = this.served();
    if (!this.takesImages) return 'This model takes no pictures.';
    if (!KINDS.includes(type)) return `“${name}” is ${type ? `of the type ${type}` : 'no picture'}; choose PNG, JPEG, WebP, GIF or AVIF.`;
    if (size > max_image_bytes) return `“${name}” has ${megabytes(size)}; this server takes at most ${megabytes(max_image_bytes)} a picture.`;
    if (this.numSent() + this.pictures.length < max_images) return '';
    return `This server takes at most ${max_images} pictures a chat; remove one, or start a new chat.`;
  }
}

const megabytes = bytes => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

const dataUrl = file => new Promise((resolve, reject) => {
  const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
  reader.readAsDataURL(file);
});
