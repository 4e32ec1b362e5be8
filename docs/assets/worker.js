// Browsers start no workers for pages that are opened from a folder. There, the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      this.inside.say = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const words = `
        function importScripts(...urls) {
          return urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
            const script = document.createElement("script");
            script.src = url; script.onload = done; script.onerror = failed;
            document.body.appendChild(script);
          })), Promise.resolve());
        }
        window.postMessage = (data) => window.say(data);`;
      const document_ = this.inside.document;
      document_.open();
      document_.write(`<html><body><script>${words}<\/script><script src="${url}"><\/script></body></html>`);
      document_.close();
      this.ready = new Promise((done) => { frame.onload = done; });
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
