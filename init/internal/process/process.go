package process

import (
	"crypto/sha256"
	"encoding/json"
	"os"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
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

// cause is why we ended a process ourselves.
type cause struct {
	reason, message string
}

// Process is one command: its process, its journal and its end. All fields that change are guarded by the manager's mu.
type Process struct {
	id      string
	raw     [16]byte
	digest  [sha256.Size]byte
	argv    []string // shortened
	cwd     string
	leased  bool
	lease   string // "" for a background process, and once its reader is gone
	pid     int
	started time.Time
	ended   time.Time

	number  uint64 // of its start
	alone   bool   // no other command ran when it was started
	since   uint64 // the time of its start, as sys.Uptime
	oomSeen int64  // the kernel's count of kills when it was started

	dead      chan struct{} // closed when it was reaped
	status    syscall.WaitStatus
	reaped    bool
	reused    bool // a later command got its pid
	oom       bool
	killed    *cause // why we killed it, nil when we did not
	exit      *Exit  // set when its last frame is in the journal
	gone      bool   // dropped by a reset
	delivered bool   // its exit was sent to a reader
	sent      uint64 // frames before this number were sent to a reader

	journal journal
	changed chan struct{}
	streams map[*stream]struct{}

	input     chan struct{} // holds a token while somebody writes to stdin
	stdin     *os.File      // nil when there is none or it is closed
	stdinSeen int64
	pty       *os.File
	stopTimer func()
}

// wait gives a channel that is closed at the next change. Call it under mu.
func (p *Process) wait() <-chan struct{} {
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// wake tells waiters and streams of a change. Call it under mu.
func (p *Process) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
	for s := range p.streams {
		s.poke()
	}
}

// closeInput ends stdin. A terminal stays open: it is output too. Call it under mu.
func (p *Process) closeInput() {
	if p.stdin != nil && p.stdin != p.pty {
		_ = p.stdin.Close()
	}
	p.stdin = nil
}

// exitOf says how a reaped process ended. Call it under mu.
func (p *Process) exitOf() Exit {
	e := Exit{Reason: reasonExited, Code: p.status.ExitStatus()}
	if p.status.Signaled() {
		s := p.status.Signal()
		name := unix.SignalName(s)
		if name == "" {
			name = s.String()
		}
		e = Exit{Reason: reasonSignaled, Code: 128 + int(s), Signal: int(s), Message: "ended by " + name}
	}
	switch {
	case p.killed != nil:
		e.Reason, e.Message = p.killed.reason, p.killed.message
		if e.Code == 0 {
			e.Code = 137 // it ended well under our kill: nobody may take that for success
		}
	case p.oom:
		e.Reason, e.Code, e.Message = reasonOOM, 137, "the kernel ended it, or a part of it: the memory limit of the sandbox was reached"
	}
	return e
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

// view describes it. Call it under mu.
func (p *Process) view() View {
	v := View{
		ID: p.id, PID: p.pid, State: "running", Background: !p.leased, StartedAt: p.started.UTC().Format(time.RFC3339Nano), FirstSeq: p.journal.first,
		NextSeq: p.journal.next(), StdinOffset: p.stdinSeen, Argv: p.argv, Cwd: p.cwd, Exit: p.exit,
	}
	end := time.Now()
	if p.exit != nil {
		v.State, end = "exited", p.ended
	}
	v.DurationMS = end.Sub(p.started).Milliseconds()
	return v
}

// finish puts the exit frame into the journal and wakes everybody. Call it under mu.
func (m *Manager) finish(p *Process, e Exit) {
	p.stopTimer()
	p.closeInput()
	p.exit = &e
	view := p.view()
	view.NextSeq++ // its own frame is counted in
	data, err := json.Marshal(view)
	if err != nil {
		data = []byte("{}") // cannot be: a View has nothing that JSON does not take
	}
	m.add(p, frame{frameExit, data})
}

const maxArgvShown = 4 << 10

// shorten keeps the first 4 KiB of the arguments, cut between characters. What it returns holds nothing of a larger string.
func shorten(argv []string) []string {
	rest := maxArgvShown
	out := make([]string, 0, min(len(argv), 16))
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
		out = append(out, string([]byte(arg)))
	}
	return out
}
