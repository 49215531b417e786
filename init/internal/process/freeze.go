package process

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/sys"
)

const (
	freezeTime = 5 * time.Second
	gentleTime = 100 * time.Millisecond // how long a freeze stops one by one, before it stops all at one moment
	haltTime   = 500 * time.Millisecond // how long what was stopped may take to stop
	vforkTime  = 100 * time.Millisecond // after that a parent that waits for its stopped child is taken for stopped
	stageTime  = time.Second            // how long the engine's own helpers may need to become what they start
)

var errNotInit = errors.New("only PID 1 of a sandbox may stop all its processes")

// exempt says whether a process must go on: a bridge, or what may become one. The engine's start of a bridge passes through helpers of other names.
func (m *Manager) exempt(p sys.Proc, uptime uint64) bool {
	return p.Bridge(m.name) || p.Outside() && p.Age(uptime) < stageTime
}

// halt stops everything at one moment, lets bridges go on at once, and returns what it stopped of the rest, parents first. What was stopped before
// it came is left alone. Call it under stopping.
func (m *Manager) halt(before map[identity]bool) (stopped []sys.Proc) {
	m.children.Lock() // nothing is between fork and exec
	_ = syscall.Kill(-1, syscall.SIGSTOP)
	m.children.Unlock()
	for begun := time.Now(); ; time.Sleep(pollTime) {
		all, err := sys.Scan()
		uptime, _ := sys.Uptime()
		stopped = stopped[:0]
		running := err != nil
		for _, p := range all {
			switch {
			case before[idOf(p)] || p.Dead():
			case m.exempt(p, uptime):
				m.send(p, syscall.SIGCONT)
			default:
				stopped = append(stopped, p)
				running = running || !p.Stopped()
			}
		}
		// A fork that was under way gives a child that is born stopped, after the signal; until then its parent is not stopped.
		if !running || time.Since(begun) > haltTime {
			return byDepth(stopped)
		}
	}
}

// stoppedNow lists what a halt would find stopped already.
func stoppedNow() map[identity]bool {
	found := map[identity]bool{}
	all, _ := sys.Scan()
	for _, p := range all {
		if p.Stopped() {
			found[idOf(p)] = true
		}
	}
	return found
}

// resume continues processes, children before parents: a shell then never sees that its child was stopped.
func (m *Manager) resume(stopped []sys.Proc) {
	for i := len(stopped) - 1; i >= 0; i-- {
		m.send(stopped[i], syscall.SIGCONT)
	}
}

// Freeze stops every process but init and its bridges, until a look finds nothing running. It leaves alone what was stopped already. thaw continues
// exactly what it stopped; limits of time stand still until then.
func (m *Manager) Freeze(ctx context.Context) (thaw func(), err error) {
	if !m.isInit {
		return nil, errNotInit
	}
	m.children.Lock()
	m.mu.Lock()
	if m.frozen {
		m.mu.Unlock()
		m.children.Unlock()
		return nil, apierr.Busy("the sandbox is frozen already: try again when that has ended")
	}
	m.frozen, m.frozenAt, m.thawed = true, time.Now(), make(chan struct{})
	m.mu.Unlock()
	m.children.Unlock()

	m.stopping.Lock()
	defer m.stopping.Unlock()
	var stopped []sys.Proc
	known := map[identity]bool{}
	remember := func(p sys.Proc) {
		if !known[idOf(p)] {
			known[idOf(p)] = true
			stopped = append(stopped, p)
		}
	}
	err = m.stopAll(ctx, remember)
	thaw = sync.OnceFunc(func() {
		m.stopping.Lock()
		defer m.stopping.Unlock()
		m.thaw(stopped)
	})
	if err != nil {
		m.thaw(stopped)
		return nil, err
	}
	return thaw, nil
}

// stopAll stops parents before children, pass by pass. Call it under stopping.
func (m *Manager) stopAll(ctx context.Context, remember func(sys.Proc)) error {
	halted := false
	for begun := time.Now(); ; time.Sleep(pollTime) {
		running, err := m.findRunning(time.Since(begun) > vforkTime)
		if err != nil {
			return fmt.Errorf("/proc cannot be read: %w", err)
		}
		if len(running) == 0 {
			return nil
		}
		if ctx.Err() != nil || time.Since(begun) > freezeTime {
			return fmt.Errorf("%d processes of the sandbox could not be stopped within %v (one is %d, %q): end them, or try again",
				len(running), time.Since(begun).Round(time.Millisecond), running[0].PID, running[0].Name)
		}
		if !halted && time.Since(begun) > gentleTime {
			halted = true // new ones come faster than they are stopped
			for _, p := range m.halt(stoppedNow()) {
				remember(p)
			}
			continue
		}
		for _, p := range byDepth(running) {
			remember(p)
			m.send(p, syscall.SIGSTOP)
		}
	}
}

// findRunning lists what is not stopped. A parent in vfork(2) cannot stop before its child goes on, and cannot do anything either: settled takes
// it for stopped when its child is.
func (m *Manager) findRunning(settled bool) (running []sys.Proc, err error) {
	all, err := sys.Scan()
	if err != nil {
		return nil, err
	}
	uptime, _ := sys.Uptime()
	hasStopped := map[int]bool{}
	for _, p := range all {
		if p.Stopped() {
			hasStopped[p.PPID] = true
		}
	}
	for _, p := range all {
		if p.Dead() || p.Stopped() || m.exempt(p, uptime) || settled && p.State == 'D' && hasStopped[p.PID] {
			continue
		}
		running = append(running, p)
	}
	return running, nil
}

// thaw continues what a freeze stopped and lets time go on. Call it under stopping.
func (m *Manager) thaw(stopped []sys.Proc) {
	m.resume(stopped)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = false
	m.lost += time.Since(m.frozenAt)
	close(m.thawed)
}

// KillAll ends every process of the sandbox but init and its bridges, and returns when they are reaped. What came from outside and is no bridge
// (somebody's debugging shell) may hold the workspace too, so it goes as well.
func (m *Manager) KillAll(ctx context.Context) error {
	if !m.isInit {
		return errNotInit
	}
	m.stopping.Lock()
	defer m.stopping.Unlock()
	m.mu.Lock()
	for _, p := range m.byPID {
		if p.killed == nil {
			p.killed = &cause{reasonCanceled, "all processes of the sandbox were ended: it was rolled back or shut down"}
		}
		p.lease = ""
	}
	m.room.Broadcast()
	m.mu.Unlock()
	m.halt(nil) // nothing can start another while it is looked for
	for begun := time.Now(); ; time.Sleep(pollTime) {
		all, err := sys.Scan()
		if err != nil {
			return fmt.Errorf("/proc cannot be read: %w", err)
		}
		left := 0
		uptime, _ := sys.Uptime()
		for _, p := range all {
			if p.Bridge(m.name) || p.Outside() && p.Dead() {
				continue // an outsider's parent is outside too, and reaps it
			}
			left++
			if !p.Dead() && !m.exempt(p, uptime) {
				m.send(p, syscall.SIGKILL)
			}
		}
		m.mu.Lock()
		left += len(m.byPID)
		m.mu.Unlock()
		if left == 0 {
			return nil
		}
		if ctx.Err() != nil || time.Since(begun) > freezeTime {
			return fmt.Errorf("%d processes of the sandbox have not ended %v after SIGKILL: try again", left, time.Since(begun).Round(time.Millisecond))
		}
	}
}
