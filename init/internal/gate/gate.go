// Package gate serialises what must not meet: archives and restores (one at a time), and everything else against a restore.
package gate

import (
	"context"
	"sync"

	"agentsandbox.dev/init/internal/apierr"
)

// State is what the sandbox is doing as a whole: "ready", "archiving" or "restoring".
type State string

// The states, as health shows them.
const (
	Ready     State = "ready"
	Archiving State = "archiving"
	Restoring State = "restoring"
)

// Gate is the one lock of a sandbox. The zero value is ready.
type Gate struct {
	mu    sync.Mutex
	state State
	users int
	idle  *sync.Cond
}

// State tells what holds the gate.
func (g *Gate) State() State {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == "" {
		return Ready
	}
	return g.state
}

// Enter lets an ordinary operation (a start, a file write) in, or says busy during a restore. Call leave when it is done.
func (g *Gate) Enter() (leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == Restoring {
		return nil, apierr.Busy("the sandbox is being rolled back: try again when the rollback has ended")
	}
	g.users++
	var once sync.Once
	return func() {
		once.Do(func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.users--
			if g.idle != nil {
				g.idle.Broadcast()
			}
		})
	}, nil
}

// Hold takes the gate for an archive or a restore; a second holder is busy. Restoring waits until everybody who entered has left, until ctx ends.
func (g *Gate) Hold(ctx context.Context, s State) (release func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != "" && g.state != Ready {
		return nil, apierr.Busy("the sandbox is already %s: try again when that has ended", g.state)
	}
	g.state = s
	if g.idle == nil {
		g.idle = sync.NewCond(&g.mu)
	}
	stop := context.AfterFunc(ctx, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.idle.Broadcast()
	})
	defer stop()
	for s == Restoring && g.users > 0 {
		if ctx.Err() != nil {
			g.state = Ready
			return nil, apierr.Busy("%d file transfers or starts are still going on: try again when they have ended", g.users)
		}
		g.idle.Wait()
	}
	var once sync.Once
	return func() {
		once.Do(func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.state = Ready
		})
	}, nil
}
