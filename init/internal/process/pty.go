package process

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPTY opens a terminal. slave is a plain descriptor for the child; the master is not blocking, so that no thread waits on it.
func openPTY(size Window) (master *os.File, slave int, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, err
	}
	slave, err = openSlave(fd)
	if err == nil {
		if err = setSize(fd, size); err == nil {
			return os.NewFile(uintptr(fd), "ptmx"), slave, nil
		}
		_ = unix.Close(slave)
	}
	_ = unix.Close(fd)
	return nil, -1, err
}

func openSlave(master int) (int, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, err
	}
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, flags)
	if errno == 0 {
		return int(fd), nil
	}
	// Not every kernel has that call (gVisor): by name then.
	number, err := unix.IoctlGetUint32(master, unix.TIOCGPTN)
	if err != nil {
		return -1, err
	}
	return unix.Open("/dev/pts/"+strconv.Itoa(int(number)), flags, 0)
}

func setSize(fd int, size Window) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
}

func resize(master *os.File, size Window) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	if err := raw.Control(func(fd uintptr) { failure = setSize(int(fd), size) }); err != nil {
		return err
	}
	return failure
}
