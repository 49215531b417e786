// Package bridge copies stdin and stdout to the socket of PID 1: `sandbox-init connect`, run by the engine from outside. One thread waits for all
// of it with poll(2): every thread that a bridge holds counts against the process limit of the sandbox.
package bridge

import (
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

const (
	comeUp     = 2 * time.Second // PID 1 may be coming up
	retry      = 10 * time.Millisecond
	bufferSize = 64 << 10
)

// flushTime is how long the last bytes wait for a reader of stdout once the other side has ended.
var flushTime = 10 * time.Second

// Run copies until either side ends and returns the exit code. The peer must be PID 1 when checkPeer is set.
func Run(socket string, checkPeer bool, stdin, stdout int, stderr io.Writer) int {
	fd, err := dial(socket)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "sandbox-init connect: no answer at the socket of PID 1 (%v): this is no sandbox, or its init has not come up\n", err)
		return 1
	}
	defer func() { _ = unix.Close(fd) }()
	if checkPeer {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil || cred.Pid != 1 {
			_, _ = fmt.Fprintln(stderr, "sandbox-init connect: the socket does not belong to PID 1: refused")
			return 1
		}
	}
	if err := copyBoth(fd, stdin, stdout); err != nil {
		_, _ = fmt.Fprintf(stderr, "sandbox-init connect: %v\n", err)
		return 1
	}
	return 0
}

func dial(socket string) (int, error) {
	deadline := time.Now().Add(comeUp)
	for {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
		if err == nil {
			return fd, nil
		}
		_ = unix.Close(fd)
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			return -1, err
		}
		time.Sleep(retry)
	}
}

// flow is one direction: what was read and not written yet.
type flow struct {
	from, to int
	buffer   []byte
	held     []byte
	ended    bool // nothing more comes in
	broken   bool // nothing more goes out
}

func (f *flow) wantsRead() bool  { return len(f.held) == 0 && !f.ended && !f.broken }
func (f *flow) wantsWrite() bool { return len(f.held) > 0 && !f.broken }
func (f *flow) done() bool       { return f.broken || f.ended && len(f.held) == 0 }

func (f *flow) read() {
	n, err := unix.Read(f.from, f.buffer)
	switch {
	case err == unix.EINTR || err == unix.EAGAIN:
	case err != nil || n == 0:
		f.ended = true
	default:
		f.held = f.buffer[:n]
		f.write() // most often there is room at once
	}
}

func (f *flow) write() {
	n, err := unix.Write(f.to, f.held)
	switch {
	case err == unix.EINTR || err == unix.EAGAIN:
	case err != nil:
		f.broken = true
	default:
		f.held = f.held[n:]
	}
}

// copyBoth moves bytes both ways. The end of stdin is passed on, and what PID 1 still answers is awaited; the end of PID 1's side, or of whoever
// reads stdout, ends everything.
func copyBoth(socket, stdin, stdout int) error {
	for _, fd := range []int{socket, stdin, stdout} {
		restore, err := setNonblock(fd)
		if err != nil {
			return fmt.Errorf("descriptor %d cannot be used: %w", fd, err)
		}
		defer restore()
	}
	in := &flow{from: stdin, to: socket, buffer: make([]byte, bufferSize)}
	out := &flow{from: socket, to: stdout, buffer: make([]byte, bufferSize)}
	said := false // the end of stdin was passed on
	for !out.done() {
		if in.done() && !said {
			said = true
			_ = unix.Shutdown(socket, unix.SHUT_WR)
		}
		wait := -1
		if out.ended || said && out.wantsWrite() {
			wait = int(flushTime / time.Millisecond)
		}
		// Descriptors with no events are watched for their end only; a negative one is passed over.
		fds := []unix.PollFd{{Fd: int32(stdin)}, {Fd: int32(socket)}, {Fd: int32(stdout)}}
		if in.wantsRead() {
			fds[0].Events = unix.POLLIN
		} else {
			fds[0].Fd = -1
		}
		if out.wantsRead() {
			fds[1].Events |= unix.POLLIN
		}
		if in.wantsWrite() {
			fds[1].Events |= unix.POLLOUT
		}
		if fds[1].Events == 0 {
			fds[1].Fd = -1 // it may have ended while its last bytes are still held: that would wake poll for ever
		}
		if out.wantsWrite() {
			fds[2].Events = unix.POLLOUT
		}
		n, err := unix.Poll(fds, wait)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting failed: %w", err)
		}
		if n == 0 {
			return fmt.Errorf("nobody has read the last %d bytes for %v", len(out.held), flushTime)
		}
		if fds[2].Revents&(unix.POLLERR|unix.POLLNVAL) != 0 || fds[2].Revents&unix.POLLHUP != 0 && !out.wantsWrite() {
			return nil // nobody reads stdout any more
		}
		if out.wantsWrite() && fds[2].Revents != 0 {
			out.write()
		}
		if out.wantsRead() && fds[1].Revents&(unix.POLLIN|unix.POLLHUP|unix.POLLERR) != 0 {
			out.read()
		}
		if in.wantsWrite() && fds[1].Revents&(unix.POLLOUT|unix.POLLHUP|unix.POLLERR) != 0 {
			in.write()
		}
		if in.wantsRead() && fds[0].Revents != 0 {
			in.read()
		}
	}
	return nil
}

// setNonblock returns how to set the old mode again: the description may be shared with others, for instance a shell's terminal.
func setNonblock(fd int) (restore func(), err error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	return func() { _, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags) }, nil
}
