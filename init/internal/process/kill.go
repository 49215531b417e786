package process

import (
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/sys"
)

const (
	killTime   = 2 * time.Second
	politeTime = 100 * time.Millisecond // how long members only are stopped, before everything is for a moment
	minRounds  = 4                      // however slow the machine is
	crowd      = 10                     // less than this part of the process limit is free
	pollTime   = 2 * time.Millisecond
)

// send signals a process that is still the one that was seen. No child of ours is reaped meanwhile, so the pid cannot be somebody else's by then.
func (m *Manager) send(p sys.Proc, signal syscall.Signal) {
	m.children.Lock()
	defer m.children.Unlock()
	if now, ok := sys.Read(p.PID); ok && now.Start == p.Start {
		_ = syscall.Kill(p.PID, signal)
	}
}

// sendGroup signals the group of a process at one moment: none of it can start another meanwhile.
func (m *Manager) sendGroup(p sys.Proc, signal syscall.Signal) {
	m.children.Lock()
	defer m.children.Unlock()
	if now, ok := sys.Read(p.PID); ok && now.Start == p.Start && now.Group == p.Group {
		_ = syscall.Kill(-p.Group, signal)
	}
}

// kill ends the whole tree of a process, which takes 2 s at most once its turn has come. The cause is kept when the process was still running.
func (m *Manager) kill(p *Process, why cause) {
	m.mu.Lock()
	if !p.reaped && p.killed == nil {
		p.killed = &why
	}
	if why.reason == reasonCanceled {
		p.lease = "" // nobody reads on: a full journal must not hold up its end
		m.room.Broadcast()
	}
	m.mu.Unlock()
	m.killing <- struct{}{}
	defer func() { <-m.killing }()
	m.killTree(p)
}

// killTree stops all that belongs to the tree until nothing new is found, ends it, and looks again. Processes that start others faster than they
// can be looked at (a fork bomb) are stopped together with everything else for a moment.
func (m *Manager) killTree(p *Process) {
	t := m.treeOf(p)
	begun := time.Now()
	for round := 0; round < minRounds || time.Since(begun) < killTime; round++ {
		// In a crowd even one look would take long: first silence, then a look.
		if m.isInit && (isCrowded() || !m.stopTree(t, begun.Add(politeTime))) {
			m.killHalted(t)
		} else {
			m.killMembers(t)
		}
		if len(t.alive) == 0 {
			return
		}
		time.Sleep(pollTime)
	}
}

func (m *Manager) killMembers(t *tree) {
	for _, one := range t.alive {
		m.send(one, syscall.SIGKILL)
	}
}

// killHalted kills while nothing runs, and lets the rest go on.
func (m *Manager) killHalted(t *tree) {
	m.stopping.Lock()
	defer m.stopping.Unlock()
	m.mu.Lock()
	frozen := m.frozen
	m.mu.Unlock()
	if frozen {
		t.scan() // so that it is known what must stay stopped
	}
	stopped := m.halt(t.stopped)
	t.scan()
	m.killMembers(t)
	var others []sys.Proc
	for _, one := range stopped {
		if !t.seen[idOf(one)] {
			others = append(others, one)
		}
	}
	m.resume(others)
}

// isCrowded says whether the process table is almost full.
func isCrowded() bool {
	limit, current := sys.PidsLimit(), sys.PidsCurrent()
	return limit != nil && current != nil && *current >= *limit-*limit/crowd
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

// signalTree sends a signal to every member.
func (m *Manager) signalTree(p *Process, signal syscall.Signal) {
	t := m.treeOf(p)
	t.scan()
	for _, one := range t.alive {
		m.send(one, signal)
	}
}
