package process

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentsandbox.dev/init/internal/sys"
)

const (
	smallestRead  = 4 << 10                // every process may hold that much, so that it makes progress whatever the others hold
	terminalQuiet = 20 * time.Millisecond  // the kernel hands a terminal's output over a little later than it was written
	terminalLimit = 200 * time.Millisecond // for what children that live on keep writing to it
	terminalRetry = 100 * time.Millisecond
)

var errNoRoom = errors.New("the journal has no room")

// follow reads the output of a process into its journal until it has exited and what was in its pipes then is read. Call it under mu.
func (m *Manager) follow(p *Process, e ends) {
	outputs := map[byte]*os.File{frameStdout: e.stdout}
	if e.stderr != nil {
		outputs[frameStderr] = e.stderr
	}
	var drained sync.WaitGroup
	for kind, file := range outputs {
		drained.Add(1)
		go m.pump(p, kind, file, e.pty != nil, sync.OnceFunc(drained.Done))
	}
	go func() {
		defer sys.Recover("the end of a command")
		<-p.dead
		for _, file := range outputs {
			// Wakes a pump that waits for more: what it has then is all that counts. Other holders of the pipe are not waited for.
			_ = file.SetReadDeadline(time.Unix(1, 0))
		}
		drained.Wait()
		m.mu.Lock()
		defer m.mu.Unlock()
		if !p.gone {
			m.finish(p, p.exitOf())
		}
	}()
}

// pump moves output into the journal. When the process has exited it takes what is in the pipe, calls drained, and then reads on into nothing, so
// that a background child that inherited the pipe lives on.
func (m *Manager) pump(p *Process, kind byte, file *os.File, terminal bool, drained func()) {
	defer sys.Recover("the reading of output")
	defer drained()
	defer func() { _ = file.Close() }()
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	for {
		_, err := m.take(p, kind, raw, maxPayload)
		switch {
		case err == nil:
		case err == errNoRoom:
			if !m.waitForRoom(p) {
				discard(raw) // a reset has dropped the journal
				return
			}
		case errors.Is(err, os.ErrDeadlineExceeded):
			if terminal {
				err = m.drainTerminal(p, kind, file, raw)
			} else {
				err = m.drain(p, kind, raw)
			}
			drained()
			if err == nil {
				_ = file.SetReadDeadline(time.Time{})
				discard(raw)
			}
			return
		case terminal && !waitDead(p, terminalRetry):
			// Nobody holds the terminal at the moment; a process may open it again.
		default:
			return
		}
	}
}

func waitDead(p *Process, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.dead:
		return true
	case <-timer.C:
		return false
	}
}

// drain takes what is in the pipe at this moment; an error ends the pipe.
func (m *Manager) drain(p *Process, kind byte, raw syscall.RawConn) error {
	left := 0
	if err := raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil {
		return err
	}
	for left > 0 {
		var n int
		var err error
		if e := raw.Control(func(fd uintptr) { n, err = m.takeNow(p, kind, fd, left) }); e != nil {
			return e
		}
		switch {
		case err == errNoRoom:
			if !m.waitForRoom(p) {
				return nil
			}
		case err == unix.EAGAIN:
			return nil
		case err != nil:
			return err
		}
		left -= n
	}
	return nil
}

// drainTerminal takes what a terminal still gives: until its end, or until it was quiet for a moment.
func (m *Manager) drainTerminal(p *Process, kind byte, file *os.File, raw syscall.RawConn) error {
	for begun := time.Now(); time.Since(begun) < terminalLimit; {
		_ = file.SetReadDeadline(time.Now().Add(terminalQuiet))
		_, err := m.take(p, kind, raw, maxPayload)
		switch {
		case err == errNoRoom:
			if !m.waitForRoom(p) {
				return nil
			}
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
	}
	return nil
}

// take waits for output and journals what is there, up to limit bytes. The error is errNoRoom, os.ErrDeadlineExceeded, io.EOF or the kernel's.
func (m *Manager) take(p *Process, kind byte, raw syscall.RawConn, limit int) (n int, err error) {
	failure := raw.Read(func(fd uintptr) bool {
		n, err = m.takeNow(p, kind, fd, limit)
		return err != unix.EAGAIN
	})
	if failure != nil {
		return 0, failure
	}
	return n, err
}

// takeNow reads without waiting, as much as the journal has room for: both under mu, so that room is never promised twice. The read is raw: it does
// not block, and the scheduler must not want one more thread while it lasts.
func (m *Manager) takeNow(p *Process, kind byte, fd uintptr, limit int) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	room := m.roomFor(p)
	if room == 0 {
		return 0, errNoRoom
	}
	for {
		n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&m.scratch)), uintptr(min(room, limit, maxPayload)))
		switch {
		case errno == syscall.EINTR:
			continue
		case errno != 0:
			return 0, errno
		case n == 0:
			return 0, io.EOF
		}
		m.add(p, frame{kind, append([]byte(nil), m.scratch[:n]...)})
		return int(n), nil
	}
}

// add appends a frame to the journal. Call it under mu.
func (m *Manager) add(p *Process, f frame) {
	m.used += f.cost()
	p.journal.add(f)
	p.wake()
}

// waitForRoom waits until the journal has room; false when the process was dropped.
func (m *Manager) waitForRoom(p *Process) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for !p.gone && m.roomFor(p) == 0 {
		m.room.Wait()
	}
	return !p.gone
}

// roomFor is how many bytes of output may be journalled now. It is 0 only with an attached reader who has to take something first, or after a
// reset: without a reader the oldest frames go. Call it under mu.
func (m *Manager) roomFor(p *Process) int {
	for !p.gone {
		own := maxJournal - p.journal.window() - frameOverhead
		all := m.config.Budget - m.used - frameOverhead
		switch {
		case own >= smallestRead && all >= smallestRead:
			return min(own, all)
		case own >= smallestRead && m.evict():
		case own >= smallestRead && p.journal.size == 0:
			return smallestRead
		case p.lease == "":
			// The newest output is worth more than the oldest. This ends: with an empty journal one of the cases above holds.
			m.used -= p.journal.drop(p.journal.first + 1)
			p.journal.released = 0
		case own >= smallestRead && p.sent > p.journal.first:
			// The others hold all there is. What was sent already is most likely with its reader, who may see no reason to acknowledge it yet; when
			// it was lost on the way, he is told of the gap.
			m.used -= p.journal.release()
		default:
			return 0
		}
	}
	return 0
}

// evict frees the journal of the oldest finished process that was delivered. Call it under mu.
func (m *Manager) evict() bool {
	for _, other := range m.order {
		if other.exit != nil && other.delivered && len(other.journal.frames) > 1 {
			m.used -= other.journal.drop(other.journal.next() - 1)
			return true
		}
	}
	return false
}

// discard reads into nothing until nobody holds the other end.
func discard(raw syscall.RawConn) {
	buffer := make([]byte, smallestRead)
	for open := true; open; {
		err := raw.Read(func(fd uintptr) bool {
			n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)))
			if errno == syscall.EAGAIN {
				return false
			}
			open = errno == syscall.EINTR || errno == 0 && n > 0
			return true
		})
		open = open && err == nil
	}
}
