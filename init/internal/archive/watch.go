package archive

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

// watch ends a transfer that stands still, takes too long, or whose channel has died. It acts from its own goroutine, since the transfer itself may hang.
type watch struct {
	last   atomic.Int64
	reason atomic.Pointer[string]
	done   chan struct{}
	ended  chan struct{}
}

// newWatch starts a watch. expire is called once at most; dead says that nothing is getting through any more.
func newWatch(ctx context.Context, p patience, expire func(dead bool)) *watch {
	w := &watch{done: make(chan struct{}), ended: make(chan struct{})}
	w.progress()
	go func() {
		defer close(w.ended)
		ticker := time.NewTicker(p.stall / 20)
		defer ticker.Stop()
		end := time.NewTimer(p.total)
		defer end.Stop()
		for {
			reason, dead := "", true
			select {
			case <-w.done:
				return
			case <-ctx.Done():
				reason = "the channel has ended"
			case <-end.C:
				reason, dead = fmt.Sprintf("the transfer took longer than %v: use a faster connection or a smaller workspace", p.total), false
			case now := <-ticker.C:
				if now.UnixNano()-w.last.Load() < int64(p.stall) {
					continue
				}
				reason = fmt.Sprintf("the transfer stood still for %v", p.stall)
			}
			w.reason.Store(&reason)
			expire(dead)
			return
		}
	}()
	return w
}

func (w *watch) progress() { w.last.Store(time.Now().UnixNano()) }

// err says why the transfer has to end; nil while it may go on.
func (w *watch) err() error {
	if reason := w.reason.Load(); reason != nil {
		return fmt.Errorf("%s", *reason)
	}
	return nil
}

func (w *watch) stop() {
	close(w.done)
	<-w.ended
}

// watchedWriter tells the watch of every piece that was taken.
type watchedWriter struct {
	w      io.Writer
	watch  *watch
	failed bool
}

func (w *watchedWriter) Write(b []byte) (int, error) {
	n, err := w.w.Write(b)
	w.watch.progress()
	w.failed = w.failed || err != nil
	return n, err
}
