// A box to write in, whose button sends and, while an answer comes, stops it.

export class Composer {
  #running = null;

  /** `send(text, signal)` is called with what was written; nothing written is enough if `hasMore()`. */
  constructor(form, send, hasMore = () => false) {
    [this.form, this.box, this.button] = [form, form.querySelector('textarea'), form.querySelector('.primary')];
    this.label = this.button.textContent;
    form.addEventListener('submit', event => {
      event.preventDefault();
      const text = this.box.value;
      if (this.#running) this.stop();
      else if (text.trim() || hasMore()) this.run(signal => send(text, signal));
      else this.box.focus();
    });
    this.box.addEventListener('keydown', event => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#running) form.requestSubmit();
    });
    document.addEventListener('keydown', event => {
      if (event.key === 'Escape' && !form.closest('[hidden]')) this.stop();
    });
  }

  /** Runs `task(signal)`, which can be stopped until it settles; nothing while another one runs. */
  async run(task) {
    if (this.#running) return;
    const running = (this.#running = new AbortController());
    this.button.textContent = 'Stop';
    this.form.parentElement.classList.add('busy');
    try {
      await task(running.signal);
    } finally {
      this.#running = null;
      this.button.textContent = this.label;
      this.form.parentElement.classList.remove('busy');
    }
  }

  stop() {
    this.#running?.abort();
  }
}
