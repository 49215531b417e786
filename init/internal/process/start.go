package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/apierr"
	"agentsandbox.dev/init/internal/sys"
)

const (
	thawWait   = 10 * time.Second      // how long a start waits for the end of a freeze
	forkTime   = 20 * time.Millisecond // a fork that takes longer may have been stopped from inside
	rescueTick = 5 * time.Millisecond

	commandNice = 10 // a tenth of the weight of init
)

// start starts a process or finds the one that an equal request started.
func (m *Manager) start(ctx context.Context, id string, s *spec) (p *Process, created bool, err error) {
	digest := s.digest()
	m.mu.Lock()
	p = m.byID[id]
	m.mu.Unlock()
	if p != nil {
		return p, false, conflictUnlessEqual(p, digest)
	}
	leave, err := m.gate.Enter()
	if err != nil {
		return nil, false, err
	}
	defer leave()
	if err := s.check(m.config.Workspace); err != nil {
		return nil, false, err
	}
	env := s.environment(m.config.Env, m.config.Workspace, id)
	path, failure := s.find(env)

	p = &Process{
		id: id, digest: digest, argv: shorten(s.Argv), cwd: s.Cwd, dead: make(chan struct{}), streams: map[*stream]struct{}{},
		input: make(chan struct{}, 1), stopTimer: func() {},
	}
	_, _ = hex.Decode(p.raw[:], []byte(id))
	if s.Lease != nil {
		p.lease, p.leased = *s.Lease, true
	}
	var e ends
	if failure == nil {
		if e, failure = m.openEnds(s); failure == nil {
			defer e.closeTheirs()
		}
	}

	if err := m.lockThawed(ctx); err != nil {
		e.closeOurs()
		return nil, false, err
	}
	defer m.children.Unlock()
	if found := m.prepare(p, s); found != nil {
		e.closeOurs()
		return found, false, conflictUnlessEqual(found, digest)
	}
	if failure == nil {
		failure, err = m.fork(p, s, path, env, e)
		if failure != nil || err != nil {
			e.closeOurs()
		}
		if err != nil {
			return nil, false, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.byID[id] = p
	m.order = append(m.order, p)
	if failure != nil {
		m.fail(p, failure)
		return p, true, nil
	}
	m.byPID[p.pid] = p
	p.stdin, p.pty = e.stdin, e.pty
	if p.lease != "" {
		m.renew(p.lease, time.Duration(s.LeaseTTL)*time.Millisecond)
	}
	if t := s.timeout(); t > 0 {
		p.stopTimer = m.after(t, func() { m.kill(p, cause{reasonTimedOut, "its time of " + t.String() + " was up"}) })
	}
	m.follow(p, e)
	return p, true, nil
}

func conflictUnlessEqual(p *Process, digest [sha256.Size]byte) error {
	if p.digest != digest {
		return apierr.Conflict("process %s was started with another body: use a new id for another command", p.id)
	}
	return nil
}

// lockThawed takes children when no freeze is on.
func (m *Manager) lockThawed(ctx context.Context) error {
	limit := time.NewTimer(thawWait)
	defer limit.Stop()
	for {
		m.children.Lock()
		m.mu.Lock()
		frozen, thawed := m.frozen, m.thawed
		m.mu.Unlock()
		if !frozen {
			return nil
		}
		m.children.Unlock()
		select {
		case <-thawed:
		case <-ctx.Done():
			return apierr.Busy("the sandbox is frozen for a snapshot, and the request ended before it was thawed: try again")
		case <-limit.C:
			return apierr.Busy("the sandbox has been frozen for a snapshot for %v: try again when that has ended", thawWait)
		}
	}
}

// prepare finds the process of an equal request that came first, or makes room for p and notes what it starts beside. Call it under children.
func (m *Manager) prepare(p *Process, s *spec) (found *Process) {
	kills := sys.OOMKills()
	m.mu.Lock()
	defer m.mu.Unlock()
	if found := m.byID[p.id]; found != nil {
		return found
	}
	for _, old := range s.Forget {
		if o := m.byID[old]; o != nil && o.exit != nil {
			m.forget(o)
		}
	}
	m.tidy()
	m.starts++
	p.number, p.alone = m.starts, len(m.byPID) == 0
	p.since, _ = sys.Uptime()
	p.oomSeen = m.oomKills
	if kills != nil {
		p.oomSeen = *kills
	}
	p.started = time.Now()
	return nil
}

// fail records a start that failed. Call it under mu.
func (m *Manager) fail(p *Process, failure *startFailure) {
	p.ended, p.reaped = time.Now(), true
	close(p.dead)
	m.add(p, frame{frameStderr, []byte(failure.message + "\n")})
	m.finish(p, Exit{Reason: reasonStartFailed, Code: failure.code, Message: failure.message})
}

// ends are the ends of a process's pipes, or of its terminal.
type ends struct {
	stdin, stdout, stderr, pty *os.File // ours; not blocking, so that no thread waits on them
	theirs                     [3]int
	close                      []int // those of theirs that are only for this process
}

func (e *ends) closeTheirs() {
	for _, fd := range e.close {
		_ = unix.Close(fd)
	}
	e.close = nil
}

func (e *ends) closeOurs() {
	for _, file := range []*os.File{e.stdin, e.stdout, e.stderr} {
		if file != nil {
			_ = file.Close()
		}
	}
}

// openEnds makes what the process reads from and writes to.
func (m *Manager) openEnds(s *spec) (e ends, failure *startFailure) {
	if s.PTY != nil {
		master, slave, err := openPTY(*s.PTY)
		if err != nil {
			return e, &startFailure{notExecutable, shown(s.Argv[0]) + ": no terminal can be opened: " + errnoText(err)}
		}
		e.stdin, e.stdout, e.pty = master, master, master
		e.theirs, e.close = [3]int{slave, slave, slave}, []int{slave}
		return e, nil
	}
	var err error
	e.theirs[0] = int(m.null.Fd())
	if s.Stdin {
		e.stdin, e.theirs[0], err = e.pipe(1)
	}
	if err == nil {
		e.stdout, e.theirs[1], err = e.pipe(0)
	}
	if err == nil {
		e.stderr, e.theirs[2], err = e.pipe(0)
	}
	if err != nil {
		e.closeTheirs()
		e.closeOurs()
		return ends{}, &startFailure{notExecutable, shown(s.Argv[0]) + ": init has no file descriptor left for it: " + errnoText(err)}
	}
	return e, nil
}

// pipe makes a pipe of which we keep one end: 0 to read, 1 to write.
func (e *ends) pipe(keep int) (ours *os.File, theirs int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	e.close = append(e.close, fds[1-keep])
	if err := unix.SetNonblock(fds[keep], true); err != nil {
		_ = unix.Close(fds[keep])
		return nil, -1, err
	}
	return os.NewFile(uintptr(fds[keep]), "pipe"), fds[1-keep], nil
}

// fork makes the process. Call it under children.
func (m *Manager) fork(p *Process, s *spec, path string, env []string, e ends) (*startFailure, error) {
	attr := &syscall.ProcAttr{Dir: s.Cwd, Env: env, Sys: &syscall.SysProcAttr{Setsid: true}}
	for _, fd := range e.theirs {
		attr.Files = append(attr.Files, uintptr(fd))
	}
	if e.pty != nil {
		attr.Sys.Setctty, attr.Sys.Ctty = true, 0
	}
	done := make(chan struct{})
	watch := time.AfterFunc(forkTime, func() { m.rescueFork(done) })
	pid, err := syscall.ForkExec(path, s.Argv, attr)
	watch.Stop()
	close(done)
	if err != nil {
		return failureOf(s, path, env, err)
	}
	p.pid, m.parent = pid, true
	m.mu.Lock()
	for _, other := range m.order {
		other.reused = other.reused || other.pid == pid
	}
	m.mu.Unlock()
	// Among hundreds of busy processes init and the bridges get their turn all the same; commands stay equal among themselves.
	_ = unix.Setpriority(unix.PRIO_PROCESS, pid, commandNice)
	// The kernel shall take a command before it takes init. Raising the score needs no privilege; a program that hides from its own user is left alone.
	if fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
		_, _ = unix.Write(fd, []byte("1000"))
		_ = unix.Close(fd)
	}
	return nil, nil
}

// rescueFork continues a child that sandboxed code stopped (kill -STOP -1) before it became its program: until then we wait for it with everything
// locked. No pid is reaped meanwhile, so none of these is somebody else's.
func (m *Manager) rescueFork(done <-chan struct{}) {
	defer sys.Recover("a fork")
	self := os.Getpid()
	tick := time.NewTicker(rescueTick)
	defer tick.Stop()
	for {
		all, err := sys.Scan()
		if err != nil {
			return
		}
		for _, p := range all {
			if p.PPID == self && p.Stopped() && p.Name == m.name {
				_ = syscall.Kill(p.PID, syscall.SIGCONT)
			}
		}
		select {
		case <-done:
			return
		case <-tick.C:
		}
	}
}
