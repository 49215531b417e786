package process

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func itoa(n int) string { return strconv.Itoa(n) }

// outputs are our ends of a process's output; stderr is nil for a terminal.
type outputs struct {
	stdout, stderr *os.File
}

func (o outputs) close() {
	for _, f := range []*os.File{o.stdout, o.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// buffers are shared: a quiet process holds none.
var buffers = sync.Pool{New: func() any { b := make([]byte, maxPayload); return &b }}

// follow reads the output of a process into its journal until it has exited and what was in its pipes then is read. Call it under the lock.
func (m *Manager) follow(p *Process, out outputs) {
	var drained sync.WaitGroup
	for kind, file := range map[byte]*os.File{frameStdout: out.stdout, frameStderr: out.stderr} {
		if file != nil {
			drained.Add(1)
			go m.pump(p, kind, file, drained.Done)
		}
	}
	go func() {
		<-p.dead
		for _, file := range []*os.File{out.stdout, out.stderr} {
			if file != nil {
				// Wakes a pump that waits for more: what it has then is all that counts. Other holders of the pipe are not waited for.
				_ = file.SetReadDeadline(time.Unix(1, 0))
			}
		}
		drained.Wait()
		m.mu.Lock()
		defer m.mu.Unlock()
		if !p.gone {
			m.finish(p, p.exitOf())
		}
	}()
}

// pump moves output into the journal. When the process has exited it takes what is in the pipe, calls drained, and then reads on into nothing,
// so that a background child that inherited the pipe lives on.
func (m *Manager) pump(p *Process, kind byte, file *os.File, drained func()) {
	defer func() { _ = file.Close() }()
	raw, err := file.SyscallConn()
	if err != nil {
		drained()
		return
	}
	for {
		open, err := readSome(raw, -1, func(data []byte) { m.put(p, kind, data) })
		if err == nil && open {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			m.drain(p, kind, raw)
			drained()
			_ = file.SetReadDeadline(time.Time{})
			for open := true; open; {
				if open, err = readSome(raw, -1, func([]byte) {}); err != nil {
					return
				}
			}
			return
		}
		// End of file, or EIO of a terminal that nobody holds any more: the exit still has to come.
		drained()
		if p.pty != nil {
			<-p.dead
		}
		return
	}
}

// drain takes what is in the pipe at this moment.
func (m *Manager) drain(p *Process, kind byte, raw syscall.RawConn) {
	left := 0
	_ = raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	for left > 0 {
		took := 0
		_ = raw.Control(func(fd uintptr) {
			buffer := buffers.Get().(*[]byte)
			n, err := unix.Read(int(fd), (*buffer)[:min(left, maxPayload)])
			if err == nil && n > 0 {
				took = n
				m.put(p, kind, (*buffer)[:n])
			}
			buffers.Put(buffer)
		})
		if took == 0 {
			return
		}
		left -= took
	}
}

// readSome waits for output and hands it over; open is false at its end.
func readSome(raw syscall.RawConn, limit int, take func([]byte)) (open bool, err error) {
	var failure error
	open = true
	err = raw.Read(func(fd uintptr) bool {
		buffer := buffers.Get().(*[]byte)
		defer buffers.Put(buffer)
		n, e := unix.Read(int(fd), *buffer)
		switch {
		case e == unix.EAGAIN:
			return false
		case e == unix.EINTR:
			return true
		case e != nil:
			failure, open = e, false
		case n == 0:
			open = false
		default:
			take((*buffer)[:n])
		}
		return true
	})
	if err == nil {
		err = failure
	}
	return open, err
}

// put appends output to the journal. With a reader attached it waits for room, which stops the reading of the pipe; without one the oldest frames go.
func (m *Manager) put(p *Process, kind byte, data []byte) {
	f := frame{kind, append([]byte(nil), data...)}
	m.mu.Lock()
	defer m.mu.Unlock()
	for !m.fits(p, f) {
		switch {
		case p.gone:
			return
		case m.evict(p):
		case p.lease == "":
			// A background process, or one whose reader is gone: the newest output is worth more than the oldest.
			m.used -= p.journal.drop(p.journal.first + 1)
		default:
			m.room.Wait()
		}
	}
	if !p.gone {
		m.append(p, f)
	}
}

func (m *Manager) append(p *Process, f frame) {
	m.used += f.cost()
	p.journal.add(f)
	p.wake()
}

// fits says whether a frame may be added: one frame is always allowed, so that every process makes progress.
func (m *Manager) fits(p *Process, f frame) bool {
	if p.gone || p.journal.size == 0 {
		return !p.gone
	}
	return p.journal.size+f.cost() <= maxJournal && m.used+f.cost() <= m.budget
}

// evict frees the journal of the oldest finished process that was delivered, when all journals together are the problem.
func (m *Manager) evict(p *Process) bool {
	if p.journal.size+maxPayload > maxJournal {
		return false
	}
	for _, other := range m.order {
		if other.exit != nil && other.delivered && len(other.journal.frames) > 1 {
			m.used -= other.journal.drop(other.journal.next() - 1)
			return true
		}
	}
	return false
}
