package process

import (
	"time"

	"agentsandbox.dev/init/internal/sys"
)

// now is the time that limits run on: it stands still while the sandbox is frozen. Call it under mu.
func (m *Manager) now() time.Time {
	if m.frozen {
		return m.frozenAt.Add(-m.lost)
	}
	return time.Now().Add(-m.lost)
}

// after calls f once that much unfrozen time has passed. Call it, and stop, under mu; f runs without.
func (m *Manager) after(d time.Duration, f func()) (stop func()) {
	const recheck = 50 * time.Millisecond // while frozen
	deadline := m.now().Add(d)
	done := false
	var timer *time.Timer
	timer = time.AfterFunc(d, func() {
		defer sys.Recover("a time limit")
		m.mu.Lock()
		rest := deadline.Sub(m.now())
		fire := !done && rest <= 0
		if !done && !fire {
			timer.Reset(max(rest, recheck))
		}
		done = done || fire
		m.mu.Unlock()
		if fire {
			f()
		}
	})
	return func() {
		done = true
		timer.Stop()
	}
}

// lease is what attached processes hang on.
type lease struct {
	stop func()
}

// renew sets a lease to end ttl from now. Call it under mu.
func (m *Manager) renew(id string, ttl time.Duration) {
	if l := m.leases[id]; l != nil {
		l.stop()
	}
	l := &lease{}
	l.stop = m.after(ttl, func() { m.expire(id, l) })
	m.leases[id] = l
}

// expire ends everything that hangs on a lease that nobody renewed.
func (m *Manager) expire(id string, l *lease) {
	m.mu.Lock()
	if m.leases[id] != l {
		m.mu.Unlock()
		return
	}
	delete(m.leases, id)
	var attached []*Process
	for _, p := range m.order {
		if p.lease == id {
			p.lease = "" // nobody reads any more: what it still writes must not hold it up
			if p.exit == nil {
				attached = append(attached, p)
			}
		}
	}
	m.room.Broadcast()
	m.mu.Unlock()
	for _, p := range attached {
		m.kill(p, cause{reasonCanceled, "its lease ran out: whoever had started it did not ask for it any more"})
	}
}

// attachedTo counts the running processes of a lease. Call it under mu.
func (m *Manager) attachedTo(id string) (n int) {
	for _, p := range m.order {
		if p.lease == id && p.exit == nil {
			n++
		}
	}
	return n
}
