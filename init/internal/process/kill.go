package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"sync"
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/sys"
)

const (
	killTime   = 2 * time.Second
	politeTime = 200 * time.Millisecond // how long a kill stops members only, before it stops everything for a moment
	settleTime = 50 * time.Millisecond  // how long a stop may take to be seen
	freezeTime = 5 * time.Second
	pollTime   = 2 * time.Millisecond
)

// identity tells a process from a later one with the same pid.
type identity struct {
	pid   int
	start uint64
}

func idOf(p sys.Proc) identity { return identity{p.PID, p.Start} }

// send signals a process that is still the one that was seen. Under the lock no child of ours is reaped, so the pid cannot be somebody else's by then.
func (m *Manager) send(id identity, signal syscall.Signal) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p, ok := sys.Read(id.pid); ok && p.Start == id.start {
		_ = syscall.Kill(id.pid, signal)
	}
}

// kill ends the whole tree of a process and waits until its exit is recorded. The reason is kept when it was still running.
func (m *Manager) kill(p *Process, reason string) {
	m.mu.Lock()
	if !p.reaped && p.killed == "" {
		p.killed = reason
	}
	if reason == reasonCanceled {
		p.lease = "" // nobody reads on: a full journal must not hold up its end
		m.room.Broadcast()
	}
	m.mu.Unlock()
	m.killing <- struct{}{}
	m.killTree(p)
	<-m.killing
}

// killTree stops all that belongs to the tree until nothing new is found, then ends it, and looks again; 2 s at most. Processes that start others
// faster than they can be looked at (a fork bomb) are stopped together with everything else for a moment.
func (m *Manager) killTree(p *Process) {
	begun := time.Now()
	tree := newTree(p)
	for time.Since(begun) < killTime {
		m.mu.Lock()
		tree.reaped, tree.alone = p.reaped, m.ranAlone(p)
		m.mu.Unlock()
		var others []identity
		if !m.stopTree(tree, begun.Add(politeTime)) {
			others = m.halt()
			tree.scan()
		}
		for _, one := range tree.alive {
			m.send(idOf(one), syscall.SIGKILL)
		}
		for _, one := range others {
			if !tree.seen[one] {
				m.send(one, syscall.SIGCONT)
			}
		}
		if len(tree.alive) == 0 {
			return
		}
		time.Sleep(pollTime)
	}
}

// stopTree stops members, whole groups at a time, until a look finds no new one; false when that did not end in time.
func (m *Manager) stopTree(t *tree, deadline time.Time) bool {
	for {
		fresh := t.scan()
		if len(fresh) == 0 {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		groups := map[int]bool{}
		for _, one := range fresh {
			// A group lies within one session, so it belongs to the tree as a whole.
			if one.Group > 1 && !groups[one.Group] {
				groups[one.Group] = true
				m.sendGroup(one, syscall.SIGSTOP)
			}
		}
	}
}

// sendGroup signals the group of a process at one moment: none of it can start another meanwhile.
func (m *Manager) sendGroup(p sys.Proc, signal syscall.Signal) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if now, ok := sys.Read(p.PID); ok && now.Start == p.Start && now.Group == p.Group {
		_ = syscall.Kill(-p.Group, signal)
	}
}

// halt stops everything at one moment, lets what came from outside go on at once, and returns what it stopped of the rest. What was stopped
// before it came is left alone.
func (m *Manager) halt() (stopped []identity) {
	if os.Getpid() != 1 {
		return nil // outside a sandbox "everything" is the machine
	}
	before := map[identity]bool{}
	all, _ := sys.ScanAll()
	for _, p := range all {
		if p.Stopped() {
			before[idOf(p)] = true
		}
	}
	m.mu.Lock()
	_ = syscall.Kill(-1, syscall.SIGSTOP)
	for pid := range m.peers {
		if pid > 1 {
			_ = syscall.Kill(pid, syscall.SIGCONT) // the bridges; this very call came over one
		}
	}
	m.mu.Unlock()
	all, _ = sys.ScanAll()
	for _, p := range byDepth(all) {
		switch {
		case before[idOf(p)] || p.Dead():
		case p.PPID == 0:
			m.send(idOf(p), syscall.SIGCONT)
		default:
			stopped = append(stopped, idOf(p))
		}
	}
	return stopped
}

// tree is what belongs to one command: its session, its group, their descendants, and whatever carries its mark in the environment.
type tree struct {
	root   int
	reaped bool   // the root has ended: its pid may be somebody else's by now
	mark   string // the command's id, which its processes have in their environment
	alone  bool   // no other command ran since it began: an orphan that began later is its own
	since  uint64
	seen   map[identity]bool // belongs to it; also after its parent died
	hidden map[identity]bool // looked at, and does not carry the mark
	alive  []sys.Proc

	ownsNumbers bool
}

func newTree(p *Process) *tree {
	return &tree{root: p.pid, mark: p.id, since: p.ticks, seen: map[identity]bool{}, hidden: map[identity]bool{}}
}

// ranAlone says that no other command was running at any time since this one began. Call it under the lock.
func (m *Manager) ranAlone(p *Process) bool {
	for _, other := range m.order {
		if other != p && other.pid > 0 && (!other.reaped || !other.ended.Before(p.started)) {
			return false
		}
	}
	return true
}

// scan looks at all processes and returns the members that were not known before.
func (t *tree) scan() (fresh []sys.Proc) {
	all, err := sys.Scan()
	if err != nil {
		return nil
	}
	member := map[int]bool{}
	t.alive = t.alive[:0]
	// The number of a session or group stays taken while it has members: when it is a live process after its owner has ended, they are another's.
	t.ownsNumbers = true
	for _, p := range all {
		if t.reaped && p.PID == t.root {
			t.ownsNumbers = false
		}
	}
	// A child's pid may be lower than its parent's after a wrap: repeat until nothing is added.
	for added := true; added; {
		added = false
		for _, p := range all {
			if !member[p.PID] && (t.seen[idOf(p)] || member[p.PPID] || t.owns(p)) {
				member[p.PID], added = true, true
				if !t.seen[idOf(p)] {
					t.seen[idOf(p)] = true
					if !p.Dead() {
						fresh = append(fresh, p)
					}
				}
				if !p.Dead() {
					t.alive = append(t.alive, p)
				}
			}
		}
	}
	return fresh
}

func (t *tree) owns(p sys.Proc) bool {
	if t.ownsNumbers && (p.PID == t.root || p.Session == t.root || p.Group == t.root) {
		return true
	}
	if t.hidden[idOf(p)] || p.Dead() {
		return false
	}
	mark, marked := sys.Env(p.PID, ExecIDVariable)
	if mark == t.mark {
		return true
	}
	// It has left session, group and parents, and shows no mark (env -i, a program that hides): when nobody else can have started it, it is ours.
	// What an earlier command left running may have orphans too; those show that command's mark.
	if !marked && t.alone && p.PPID == 1 && p.Start >= t.since {
		return true
	}
	t.hidden[idOf(p)] = true
	return false
}

// Freeze stops every process but init and what came from outside, until a look finds nothing running. It leaves alone what was stopped already.
// thaw continues exactly what it stopped.
func (m *Manager) Freeze(ctx context.Context) (thaw func(), err error) {
	m.mu.Lock()
	if m.frozen {
		m.mu.Unlock()
		return nil, apierr.Busy("the sandbox is frozen already: try again when that has ended")
	}
	m.frozen, m.stopped, m.thawed = true, time.Now(), make(chan struct{})
	m.mu.Unlock()

	stopped := m.halt()
	var once sync.Once
	thaw = func() { once.Do(func() { m.thaw(stopped) }) }
	for deadline := time.Now().Add(freezeTime); ; time.Sleep(pollTime) {
		all, err := sys.Scan()
		if err != nil {
			thaw()
			return nil, err
		}
		var running []sys.Proc
		for _, p := range all {
			if !p.Dead() && !p.Stopped() {
				running = append(running, p)
			}
		}
		if len(running) == 0 {
			return thaw, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			thaw()
			return nil, fmt.Errorf("%d processes of the sandbox could not be stopped within %v: end them, or try again", len(running), freezeTime)
		}
		if time.Until(deadline) < freezeTime-settleTime {
			// It was continued from outside, or came from there since: it has not seen our signal, or has lost it.
			for _, p := range running {
				stopped = appendNew(stopped, idOf(p))
				m.send(idOf(p), syscall.SIGSTOP)
			}
		}
	}
}

func appendNew(all []identity, one identity) []identity {
	if slices.Contains(all, one) {
		return all
	}
	return append(all, one)
}

// thaw continues what a freeze stopped, children before parents, and lets time go on.
func (m *Manager) thaw(stopped []identity) {
	for i := len(stopped) - 1; i >= 0; i-- {
		m.send(stopped[i], syscall.SIGCONT)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.frozen {
		m.frozen = false
		m.lost += time.Since(m.stopped)
		close(m.thawed)
	}
}

// unfrozen waits until no freeze is on.
func (m *Manager) unfrozen(ctx context.Context) error {
	for {
		m.mu.Lock()
		frozen, thawed := m.frozen, m.thawed
		m.mu.Unlock()
		if !frozen {
			return nil
		}
		select {
		case <-thawed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// byDepth orders processes so that a parent comes before its children.
func byDepth(all []sys.Proc) []sys.Proc {
	parent := make(map[int]int, len(all))
	for _, p := range all {
		parent[p.PID] = p.PPID
	}
	depth := func(pid int) (n int) {
		for n < len(all) {
			up, ok := parent[pid]
			if !ok {
				break
			}
			pid = up
			n++
		}
		return n
	}
	sorted := append([]sys.Proc(nil), all...)
	levels := make(map[int]int, len(all))
	for _, p := range sorted {
		levels[p.PID] = depth(p.PID)
	}
	sort.SliceStable(sorted, func(i, j int) bool { return levels[sorted[i].PID] < levels[sorted[j].PID] })
	return sorted
}

// KillAll ends every process of the sandbox but init and its bridges, and returns when they are reaped. What came from outside and is no bridge
// (somebody's debugging shell) may hold the workspace too, so it goes as well.
func (m *Manager) KillAll(ctx context.Context) error {
	if os.Getpid() != 1 {
		return errors.New("this is not PID 1 of a sandbox: everything it sees is not its own to end")
	}
	m.halt() // nothing can start another while it is looked for
	deadline := time.Now().Add(freezeTime)
	for {
		all, err := sys.ScanAll()
		if err != nil {
			return err
		}
		left := 0
		for _, p := range all {
			m.mu.Lock()
			bridge := m.peers[p.PID] > 0
			m.mu.Unlock()
			if bridge {
				continue
			}
			if p.PPID != 0 || !p.Dead() {
				left++
			}
			if !p.Dead() {
				m.send(idOf(p), syscall.SIGKILL)
			}
		}
		m.mu.Lock()
		left += len(m.byPID)
		m.mu.Unlock()
		if left == 0 {
			return nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return fmt.Errorf("%d processes of the sandbox did not end within %v of SIGKILL", left, freezeTime)
		}
		time.Sleep(pollTime)
	}
}
