package process

import (
	"runtime/debug"
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/sys"
)

const (
	guardEvery = time.Second
	restAfter  = 10 // ticks without a child: then init gives back the memory that it does not use
)

// Guard continues what came from outside and was stopped from inside: `kill -STOP -1` also stops the bridges, and the helper by which the engine is
// just starting one, for which the engine then waits for ever. Nobody else is there to continue them. It never returns; it looks only while there
// is somebody who could have done it. A sandbox that rests gives its memory back.
func (m *Manager) Guard() {
	tick := time.NewTicker(guardEvery)
	defer tick.Stop()
	for quiet := restAfter; ; <-tick.C {
		m.children.Lock()
		active := m.parent
		m.children.Unlock()
		quiet++
		if active {
			quiet = 0
		}
		if quiet <= 1 {
			m.continueOutsiders()
		}
		if quiet == restAfter {
			debug.FreeOSMemory()
		}
	}
}

func (m *Manager) continueOutsiders() {
	defer sys.Recover("the guard of bridges")
	m.stopping.Lock() // whoever stops processes now has his own mind about them
	defer m.stopping.Unlock()
	m.mu.Lock()
	frozen := m.frozen
	m.mu.Unlock()
	all, err := sys.Scan()
	if err != nil {
		return
	}
	for _, p := range all {
		if p.Outside() && p.Stopped() && (!frozen || p.Bridge(m.name)) {
			m.send(p, syscall.SIGCONT)
		}
	}
}
