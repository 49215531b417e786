// Package process runs, follows and kills the commands of a sandbox (init/API.md, "Processes"). One lock, the manager's, guards everything;
// nothing blocks while it is held but a fork, so that a process is known before it can be reaped.
package process

import (
	"crypto/rand"
	"encoding/hex"
	"sync"
	"syscall"
	"time"

	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/sys"
)

const (
	maxFinished  = 256
	keepFinished = 10 * time.Minute
	maxJournal   = 1 << 20
	maxJournals  = 8 << 20
)

// Config says where commands run and with what environment.
type Config struct {
	Workspace string
	Env       []string // init's own environment, already without what is not for commands
	Budget    int64    // bytes of all journals together; 0: by the sandbox's memory limit
}

// Manager is the process table of a sandbox.
type Manager struct {
	config Config
	gate   *gate.Gate

	mu       sync.Mutex
	room     *sync.Cond // a journal has room again, or a process has lost its reader
	boot     string
	byID     map[string]*Process
	byPID    map[int]*Process
	order    []*Process
	streams  map[string]*stream
	leases   map[string]*lease
	peers    map[int]int // pid of a connected bridge -> its connections
	used     int
	budget   int
	oomKills int64

	frozen  bool
	thawed  chan struct{} // closed when a freeze ends
	stopped time.Time     // when the freeze began
	lost    time.Duration // time spent frozen

	killing chan struct{} // how many kills scan /proc at once
}

// New makes an empty table. Start its reaper with Reap before anything is started.
func New(c Config, g *gate.Gate) *Manager {
	m := &Manager{config: c, gate: g, boot: newID(), killing: make(chan struct{}, 2)}
	m.room = sync.NewCond(&m.mu)
	m.clear()
	m.budget = maxJournals
	if c.Budget > 0 {
		m.budget = int(c.Budget)
	} else if limit := sys.MemoryLimit(); limit != nil && *limit/8 < maxJournals {
		m.budget = int(*limit / 8)
	}
	if n := sys.OOMKills(); n != nil {
		m.oomKills = *n
	}
	return m
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func (m *Manager) clear() {
	m.byID, m.byPID = map[string]*Process{}, map[int]*Process{}
	m.streams, m.leases = map[string]*stream{}, map[string]*lease{}
	m.peers = orEmpty(m.peers)
	m.order, m.used = nil, 0
}

func orEmpty(peers map[int]int) map[int]int {
	if peers == nil {
		return map[int]int{}
	}
	return peers
}

// BootID names this life of the table: after a restart or a restore it is another.
func (m *Manager) BootID() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.boot
}

// Running counts the processes that have not ended.
func (m *Manager) Running() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.byPID)
}

// AddPeer remembers a connected bridge, which no freeze and no kill may touch. Call the result when its connection ends.
func (m *Manager) AddPeer(pid int) (remove func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peers[pid]++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.peers[pid]--; m.peers[pid] <= 0 {
			delete(m.peers, pid)
		}
	}
}

// Reap owns waiting: it takes every child that ended, ours and the orphans that were given to PID 1. It never returns.
// There is no other wait in this program: a second one loses exit codes to this one.
func (m *Manager) Reap(signals <-chan struct{}) {
	for range signals {
		for m.reapOne() {
		}
	}
}

func (m *Manager) reapOne() bool {
	// Under the lock, so that no pid is signalled after it was reaped, and none is reaped before its start is recorded.
	m.mu.Lock()
	defer m.mu.Unlock()
	var status syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
	if err == syscall.EINTR {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	if p := m.byPID[pid]; p != nil {
		delete(m.byPID, pid)
		p.status, p.reaped, p.ended = status, true, time.Now()
		p.oom = m.wasOOM(status)
		close(p.dead)
	}
	return true
}

// wasOOM says whether the kernel's count of kills for want of memory rose since the last death that looks like one.
func (m *Manager) wasOOM(status syscall.WaitStatus) bool {
	killed := status.Signaled() && status.Signal() == syscall.SIGKILL || status.Exited() && status.ExitStatus() == 137
	if !killed {
		return false
	}
	n := sys.OOMKills()
	if n == nil || *n <= m.oomKills {
		return false
	}
	m.oomKills = *n
	return true
}

// now is the time that limits run on: it stands still while the sandbox is frozen.
func (m *Manager) now() time.Time {
	if m.frozen {
		return m.stopped.Add(-m.lost)
	}
	return time.Now().Add(-m.lost)
}

// after calls f once that much unfrozen time has passed. Call it under the lock; f runs without it.
func (m *Manager) after(d time.Duration, f func()) (stop func()) {
	deadline := m.now().Add(d)
	done := false
	var timer *time.Timer
	timer = time.AfterFunc(d, func() {
		m.mu.Lock()
		rest := deadline.Sub(m.now())
		if !done && rest > 0 {
			timer.Reset(max(rest, 50*time.Millisecond))
			m.mu.Unlock()
			return
		}
		fire := !done
		done = true
		m.mu.Unlock()
		if fire {
			f()
		}
	})
	return func() { done = true; timer.Stop() }
}

// forget drops a finished process. Call it under the lock.
func (m *Manager) forget(p *Process) {
	m.used -= p.journal.drop(p.journal.next())
	delete(m.byID, p.id)
	for i, other := range m.order {
		if other == p {
			m.order = append(m.order[:i], m.order[i+1:]...)
			break
		}
	}
	m.room.Broadcast()
}

// tidy keeps the newest finished processes, and none for longer than 10 minutes. Call it under the lock.
func (m *Manager) tidy() {
	finished := 0
	for i := len(m.order) - 1; i >= 0; i-- {
		p := m.order[i]
		if p.exit == nil {
			continue
		}
		if finished++; finished > maxFinished || time.Since(p.ended) > keepFinished {
			m.forget(p)
		}
	}
}

// Reset drops every process and journal, ends all event streams and makes a new boot id: nothing of before is left.
func (m *Manager) Reset() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.order {
		p.gone = true
		p.stopTimer()
		p.closeInput()
		p.wake()
	}
	for _, s := range m.streams {
		s.end()
	}
	m.clear()
	m.boot = newID()
	m.room.Broadcast()
	return m.boot
}

type lease struct {
	deadline time.Time
	stop     func()
}

// renew sets a lease to end ttl from now. Call it under the lock.
func (m *Manager) renew(id string, ttl time.Duration) {
	if l := m.leases[id]; l != nil {
		l.stop()
	}
	l := &lease{deadline: m.now().Add(ttl)}
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
		go m.kill(p, reasonCanceled)
	}
}

// attachedTo counts the running processes of a lease. Call it under the lock.
func (m *Manager) attachedTo(id string) (n int) {
	for _, p := range m.order {
		if p.lease == id && p.exit == nil {
			n++
		}
	}
	return n
}
