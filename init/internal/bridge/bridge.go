// Package bridge copies stdin and stdout to the socket of PID 1: `sandbox-init connect`, run by the engine from outside.
package bridge

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	comeUp = 2 * time.Second
	retry  = 10 * time.Millisecond
)

// Run copies until either side ends and returns the exit code. It uses blocking calls on two threads: nothing here needs more.
func Run(socket string, checkPeer bool) int {
	fd, err := dial(socket)
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init connect: no answer at the socket of PID 1: %v\n", err)
		return 1
	}
	if checkPeer {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil || cred.Pid != 1 {
			fmt.Fprintln(os.Stderr, "sandbox-init connect: the socket does not belong to PID 1: refused")
			return 1
		}
	}
	go func() {
		pipe(0, fd)
		// The other side has said everything: so have we. What PID 1 still answers goes on.
		_ = unix.Shutdown(fd, unix.SHUT_WR)
	}()
	pipe(fd, 1)
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
		// PID 1 may be coming up.
		if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			return -1, err
		}
		time.Sleep(retry)
	}
}

// pipe copies from one descriptor to the other until the end of either.
func pipe(from, to int) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := unix.Read(from, buffer)
		if err == unix.EINTR {
			continue
		}
		if err == unix.EAGAIN {
			wait(from, unix.POLLIN)
			continue
		}
		if err != nil || n == 0 {
			return
		}
		for rest := buffer[:n]; len(rest) > 0; {
			n, err := unix.Write(to, rest)
			switch {
			case err == unix.EINTR:
			case err == unix.EAGAIN:
				wait(to, unix.POLLOUT)
			case err != nil:
				return
			default:
				rest = rest[n:]
			}
		}
	}
}

func wait(fd int, events int16) {
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, -1)
}
