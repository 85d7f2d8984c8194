// Search from a page that was opened from a disk: browsers start no workers there, so the search runs in a frame, which
// gets and gives the messages of a worker. Pages from a server keep the browser's own workers.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.ready = new Promise((done) => {
        const page = inner.document;
        page.open();
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = page.createElement("script");
        script.src = url;
        script.onload = done;
        page.write("<!doctype html><title>search</title><body>");
        page.body.append(script);
        page.close();
      });
      this.send = (data) => inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.ready.then(() => this.send(data));
    }
    terminate() {}
  };
