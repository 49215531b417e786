// Package process runs, follows and kills the commands of a sandbox (init/API.md, "Processes").
//
// Two locks guard it, taken in this order. `children` is held while a child is made, reaped or signalled: so no exit code is lost, a pid is
// signalled only before it was reaped, and nothing starts unseen while everything is being stopped. `mu` guards the table and the journals; nothing
// blocks while it is held.
package process

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"agentsandbox.dev/init/internal/gate"
	"agentsandbox.dev/init/internal/sys"
)

const (
	maxFinished  = 256
	keepFinished = 10 * time.Minute
	maxJournal   = 1 << 20
	maxJournals  = 8 << 20
	journalShare = 8 // the journals together may take this part of the sandbox's memory
)

// JournalBudget is how many bytes all journals may hold together, by the sandbox's memory limit.
func JournalBudget() int {
	if limit := sys.MemoryLimit(); limit != nil {
		return int(min(*limit/journalShare, maxJournals))
	}
	return maxJournals
}

// Config says where commands run and with what environment.
type Config struct {
	Workspace string
	Env       []string // init's own environment, already without what is not for commands
	Budget    int      // bytes of all journals together
}

// Manager is the process table of a sandbox.
type Manager struct {
	config Config
	gate   *gate.Gate
	null   *os.File
	name   string // our own, by which bridges are known
	isInit bool   // PID 1: every process here is ours to stop
	boot   atomic.Value

	children sync.Mutex
	parent   bool       // there are children of ours, also orphans; guarded by children
	stopping sync.Mutex // held by whoever stops processes at large; taken before children

	mu       sync.Mutex
	room     *sync.Cond // a journal may have room again
	byID     map[string]*Process
	byPID    map[int]*Process // what was not reaped
	order    []*Process       // oldest first
	streams  map[string]*stream
	leases   map[string]*lease
	used     int
	starts   uint64
	oomKills int64 // the kernel's count up to which deaths are explained
	scratch  [maxPayload]byte

	frozen   bool
	thawed   chan struct{} // closed when a freeze ends
	frozenAt time.Time
	lost     time.Duration // time spent frozen

	killing chan struct{} // bounds how many kills look at /proc at once
	bodies  chan struct{} // bounds how many large bodies are in memory at once
}

// New makes an empty table. Start its reaper with Reap before anything is started.
func New(c Config, g *gate.Gate) (*Manager, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be opened, which commands need for their input: %w", os.DevNull, err)
	}
	m := &Manager{
		config: c, gate: g, null: null, isInit: os.Getpid() == 1, killing: make(chan struct{}, 2), bodies: make(chan struct{}, 2),
	}
	m.boot.Store(newBootID())
	m.room = sync.NewCond(&m.mu)
	if self, ok := sys.Read(os.Getpid()); ok {
		m.name = self.Name
	}
	m.clear()
	if n := sys.OOMKills(); n != nil {
		m.oomKills = *n
	}
	return m, nil
}

func newBootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	return hex.EncodeToString(b[:])
}

func (m *Manager) clear() {
	m.byID, m.byPID = map[string]*Process{}, map[int]*Process{}
	m.streams, m.leases = map[string]*stream{}, map[string]*lease{}
	m.order, m.used = nil, 0
}

// BootID names this life of the table: after a restart or a restore it is another. It takes no lock: it goes into every answer.
func (m *Manager) BootID() string { return m.boot.Load().(string) }

// Running counts the commands that have not ended.
func (m *Manager) Running() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.byPID)
}

// Reap owns waiting: it takes every child that ended, ours and the orphans that were given to PID 1, whenever a SIGCHLD was seen. There is no other
// wait in this program: a second one loses exit codes to this one. It returns when signals is closed.
func (m *Manager) Reap(signals <-chan os.Signal) {
	for range signals {
		for m.reapOne() {
		}
	}
}

func (m *Manager) reapOne() (more bool) {
	defer sys.Recover("the reaper")
	m.children.Lock()
	defer m.children.Unlock()
	pid, status, err := waitAny()
	if err == syscall.EINTR {
		return true
	}
	if err != 0 || pid <= 0 {
		m.parent = err != syscall.ECHILD
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	oom := killedBySystem(status) && m.explainKill(m.byPID[pid])
	if p := m.byPID[pid]; p != nil {
		delete(m.byPID, pid)
		p.status, p.reaped, p.oom, p.ended = status, true, oom, time.Now()
		close(p.dead)
	}
	return true
}

// waitAny is wait4(-1, WNOHANG), raw like all short calls on hot ways: the scheduler must not want one more thread while it lasts.
func waitAny() (int, syscall.WaitStatus, syscall.Errno) {
	var status int32
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&status)), syscall.WNOHANG, 0, 0, 0)
	return int(pid), syscall.WaitStatus(status), errno
}

// killedBySystem says whether a death looks like one for want of memory: its own, or that of a child, which a shell reports as 137.
func killedBySystem(status syscall.WaitStatus) bool {
	return status.Signaled() && status.Signal() == syscall.SIGKILL || status.Exited() && status.ExitStatus() == 137
}

// explainKill says whether the kernel's count of kills for want of memory has one that explains this death: it rose since the process was started,
// and no earlier death was explained by that. p is nil for an orphan. Call it under mu.
func (m *Manager) explainKill(p *Process) bool {
	n := sys.OOMKills()
	if n == nil || *n <= m.oomKills || p != nil && *n <= p.oomSeen {
		return false
	}
	m.oomKills = *n
	return true
}

// forget drops a finished process. Call it under mu.
func (m *Manager) forget(p *Process) {
	m.used -= p.journal.drop(p.journal.next())
	delete(m.byID, p.id)
	for s := range p.streams {
		s.remove(p)
	}
	for i, other := range m.order {
		if other == p {
			m.order = append(m.order[:i], m.order[i+1:]...)
			break
		}
	}
	m.room.Broadcast()
}

// tidy keeps the newest finished processes, and none for longer than 10 minutes. Call it under mu.
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
	m.children.Lock()
	defer m.children.Unlock()
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
	for _, l := range m.leases {
		l.stop()
	}
	m.clear()
	m.boot.Store(newBootID())
	m.room.Broadcast()
	return m.BootID()
}

// CommandEnvironment is an environment without what a cluster adds for its own services, whose addresses are no business of sandboxed code.
func CommandEnvironment(all []string) []string {
	kept := make([]string, 0, len(all))
	for _, entry := range all {
		if !strings.HasPrefix(entry, "KUBERNETES_") {
			kept = append(kept, entry)
		}
	}
	return kept
}
