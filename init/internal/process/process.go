package process

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/sys"
)

// Why a process ended (init/API.md, "Processes").
const (
	reasonExited      = "exited"
	reasonSignaled    = "signaled"
	reasonTimedOut    = "timed_out"
	reasonCanceled    = "canceled"
	reasonOOM         = "oom"
	reasonStartFailed = "start_failed"
)

// Exit is how a process ended; Code is what a shell would say.
type Exit struct {
	Reason  string `json:"reason"`
	Code    int    `json:"code"`
	Signal  int    `json:"signal"`
	Message string `json:"message"`
}

// Process is one command: its process, its journal and its end. All fields are guarded by the manager's lock.
type Process struct {
	id      string
	raw     [16]byte
	digest  [sha256.Size]byte
	pid     int
	argv    []string
	cwd     string
	lease   string // "" for a background process, and once its reader is gone
	leased  bool
	started time.Time
	ticks   uint64 // when it was started, as /proc counts
	ended   time.Time

	dead      chan struct{} // closed when it was reaped
	status    syscall.WaitStatus
	reaped    bool
	oom       bool
	killed    string // why we killed it, "" when we did not
	exit      *Exit  // set when its last frame is in the journal
	gone      bool   // dropped by a reset
	delivered bool   // its exit was sent to a reader

	journal journal
	changed chan struct{}
	streams map[*stream]struct{}

	stdin     *os.File
	stdinSeen int64
	stdinEOF  bool
	pty       *os.File
	stopTimer func()
}

// wait gives a channel that is closed at the next change. Call it under the lock.
func (p *Process) wait() <-chan struct{} {
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// wake tells waiters and streams of a change. Call it under the lock.
func (p *Process) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
	for s := range p.streams {
		s.poke()
	}
}

func (p *Process) closeInput() {
	if p.stdin != nil && p.stdin != p.pty {
		_ = p.stdin.Close()
	}
	p.stdin = nil
}

// start starts a process or finds the one that an equal request started.
func (m *Manager) start(id string, s spec) (p *Process, created bool, err error) {
	digest := s.digest()
	if p, err := m.existing(id, digest); p != nil || err != nil {
		return p, false, err
	}
	if err := s.check(m.config.Workspace); err != nil {
		return nil, false, err
	}
	env := s.environment(m.config.Env, m.config.Workspace, id)
	path, failure := s.find(env)

	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.byID[id]; p != nil {
		return p, false, conflictUnlessEqual(p, digest)
	}
	for _, old := range s.Forget {
		if p := m.byID[old]; p != nil && p.exit != nil {
			m.forget(p)
		}
	}
	p = &Process{
		id: id, digest: digest, argv: s.Argv, cwd: s.Cwd, started: time.Now(), ticks: sys.Ticks(), dead: make(chan struct{}), streams: map[*stream]struct{}{}, stopTimer: func() {},
	}
	_, _ = hex.Decode(p.raw[:], []byte(id))
	if s.Lease != nil {
		p.lease, p.leased = *s.Lease, true
	}
	var out outputs
	if failure == nil {
		out, failure, err = p.fork(s, path, env)
		if err != nil {
			return nil, false, err
		}
	}
	m.tidy()
	m.byID[id] = p
	m.order = append(m.order, p)
	if failure != nil {
		m.fail(p, failure)
		return p, true, nil
	}
	m.byPID[p.pid] = p
	if p.lease != "" {
		m.renew(p.lease, time.Duration(s.LeaseTTL)*time.Millisecond)
	}
	if t := s.timeout(); t > 0 {
		p.stopTimer = m.after(t, func() { m.kill(p, reasonTimedOut) })
	}
	m.follow(p, out)
	return p, true, nil
}

func (m *Manager) existing(id string, digest [sha256.Size]byte) (*Process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.byID[id]; p != nil {
		return p, conflictUnlessEqual(p, digest)
	}
	return nil, nil
}

func conflictUnlessEqual(p *Process, digest [sha256.Size]byte) error {
	if p.digest != digest {
		return apierr.Conflict("process %s was started with another body: use a new id for another command", p.id)
	}
	return nil
}

func (m *Manager) fail(p *Process, failure *startFailure) {
	p.ended, p.reaped = time.Now(), true
	close(p.dead)
	m.append(p, frame{frameStderr, []byte(failure.message + "\n")})
	m.finish(p, Exit{Reason: reasonStartFailed, Code: failure.code, Message: failure.message})
}

// fork makes the process. Called under the lock: it must be known before it can be reaped, and a fork takes a fraction of a millisecond.
func (p *Process) fork(s spec, path string, env []string) (out outputs, failure *startFailure, err error) {
	var files []uintptr
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
		if failure != nil || err != nil {
			out.close()
			p.closeInput()
		}
	}()
	attr := &syscall.SysProcAttr{Setsid: true}
	if s.PTY != nil {
		master, slave, e := openPTY(*s.PTY)
		if e != nil {
			return out, &startFailure{126, s.Argv[0] + ": no terminal can be opened: " + errnoText(e)}, nil
		}
		theirs = append(theirs, slave)
		fd := slave.Fd()
		files = []uintptr{fd, fd, fd}
		attr.Setctty, attr.Ctty = true, 0
		p.pty, p.stdin = master, master
		out.stdout = master
	} else {
		stdin, e := p.openInput(s.Stdin, &theirs)
		if e != nil {
			return out, tooManyFiles(s.Argv[0], e), nil
		}
		var ends [2]*os.File
		for i, read := range []**os.File{&out.stdout, &out.stderr} {
			if *read, ends[i], e = os.Pipe(); e != nil {
				return out, tooManyFiles(s.Argv[0], e), nil
			}
			theirs = append(theirs, ends[i])
		}
		files = []uintptr{stdin, ends[0].Fd(), ends[1].Fd()}
	}
	pid, e := syscall.ForkExec(path, s.Argv, &syscall.ProcAttr{Dir: s.Cwd, Env: env, Files: files, Sys: attr})
	if e != nil {
		failure, err = failureOf(s.Argv[0], e)
		return out, failure, err
	}
	p.pid = pid
	// The kernel shall take a command before it takes init. Raising the score needs no privilege; a program that hides from its own user is left alone.
	_ = os.WriteFile("/proc/"+itoa(pid)+"/oom_score_adj", []byte("1000"), 0)
	return out, nil, nil
}

func (p *Process) openInput(wanted bool, theirs *[]*os.File) (uintptr, error) {
	if !wanted {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return 0, err
		}
		*theirs = append(*theirs, null)
		return null.Fd(), nil
	}
	read, write, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	*theirs = append(*theirs, read)
	p.stdin = write
	return read.Fd(), nil
}

func tooManyFiles(name string, err error) *startFailure {
	return &startFailure{126, name + ": init has no file descriptor left for it: " + errnoText(err)}
}

// exitOf says how a reaped process ended. Call it under the lock.
func (p *Process) exitOf() Exit {
	e := Exit{Reason: reasonExited, Code: p.status.ExitStatus()}
	if p.status.Signaled() {
		s := p.status.Signal()
		e = Exit{Reason: reasonSignaled, Code: 128 + int(s), Signal: int(s), Message: "ended by signal " + unix.SignalName(s)}
	}
	switch {
	case p.killed != "":
		e.Reason = p.killed
		if e.Code == 0 {
			e.Code = 137 // it ended well under our kill: nobody may take that for success
		}
		e.Message = map[string]string{reasonTimedOut: "its time was up", reasonCanceled: "it was cancelled"}[p.killed]
	case p.oom:
		e.Reason, e.Code, e.Message = reasonOOM, 137, "the kernel ended it: the sandbox's memory limit was reached"
	}
	return e
}

// finish puts the exit frame into the journal and wakes everybody. Call it under the lock.
func (m *Manager) finish(p *Process, e Exit) {
	p.stopTimer()
	p.closeInput()
	p.exit = &e
	// The number of its own frame is counted in.
	view := p.view()
	view.NextSeq++
	data, _ := json.Marshal(view)
	m.used += frame{frameExit, data}.cost()
	p.journal.add(frame{frameExit, data})
	p.wake()
}

// View is a process as the API shows it.
type View struct {
	ID          string   `json:"id"`
	PID         int      `json:"pid"`
	State       string   `json:"state"`
	Background  bool     `json:"background"`
	StartedAt   string   `json:"started_at"`
	DurationMS  int64    `json:"duration_ms"`
	FirstSeq    uint64   `json:"first_seq"`
	NextSeq     uint64   `json:"next_seq"`
	StdinOffset int64    `json:"stdin_offset"`
	Argv        []string `json:"argv"`
	Cwd         string   `json:"cwd"`
	Exit        *Exit    `json:"exit"`
}

const maxArgvShown = 4 << 10

func (p *Process) view() View {
	v := View{
		ID: p.id, PID: p.pid, State: "running", Background: !p.leased, StartedAt: p.started.UTC().Format(time.RFC3339Nano), FirstSeq: p.journal.first,
		NextSeq: p.journal.next(), StdinOffset: p.stdinSeen, Argv: shorten(p.argv), Cwd: p.cwd, Exit: p.exit,
	}
	end := time.Now()
	if p.exit != nil {
		v.State, end = "exited", p.ended
	}
	v.DurationMS = end.Sub(p.started).Milliseconds()
	return v
}

func shorten(argv []string) []string {
	rest := maxArgvShown
	out := make([]string, 0, min(len(argv), 64))
	for _, arg := range argv {
		if rest <= 0 {
			break
		}
		if len(arg) > rest {
			cut := rest
			for cut > 0 && !utf8.RuneStart(arg[cut]) {
				cut--
			}
			arg = arg[:cut]
		}
		rest -= len(arg) + 1
		out = append(out, arg)
	}
	return out
}
