package archive

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"agentsandbox.dev/init/internal/tree"
	"golang.org/x/sys/unix"
)

// clean empties what processes can leave behind outside the workspace, after they were ended.
func (h *Handler) clean() error {
	var errs []error
	for _, path := range h.volatile {
		errs = append(errs, emptyFolder(path, h.uid))
	}
	if h.ipc {
		errs = append(errs, removeIPC())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("something of before is left: %w", err)
	}
	return nil
}

// Clean empties, at a start, what an earlier run of this sandbox has left outside the workspace: on a cluster /tmp and /dev/shm outlive the container.
// Only for a real sandbox: tests run beside the machine's own folders.
func (h *Handler) Clean() {
	if err := h.clean(); err != nil {
		fmt.Fprintf(os.Stderr, "sandbox-init: at the start: %v\n", err)
	}
}

// emptyFolder removes what is in a folder, where there is one. What belongs to others cannot have been put there by the sandbox, and stays.
func emptyFolder(path string, uid uint32) error {
	fd, err := tree.Open(unix.AT_FDCWD, path, folderFlags, 0)
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s cannot be opened: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	return tree.Each(fd, func(e tree.Entry) error {
		err := tree.Remove(fd, e.Name)
		if err == nil {
			return nil
		}
		if st, examined := tree.Stat(fd, e.Name); examined == nil && st.Uid != uid {
			return nil
		}
		return fmt.Errorf("%s: %w", path, err)
	})
}

// removeIPC removes the SysV shared memory segments, semaphores and message queues of this IPC namespace that are ours. They outlive processes.
func removeIPC() error {
	var errs []error
	for kind, call := range map[string]uintptr{"shm": unix.SYS_SHMCTL, "sem": unix.SYS_SEMCTL, "msg": unix.SYS_MSGCTL} {
		ids, err := listIPC(kind)
		if err != nil {
			errs = append(errs, err)
		}
		for _, id := range ids {
			// shmctl(id, cmd, buf), msgctl(id, cmd, buf), but semctl(id, number, cmd).
			second, third := uintptr(unix.IPC_RMID), uintptr(0)
			if kind == "sem" {
				second, third = 0, unix.IPC_RMID
			}
			_, _, errno := unix.Syscall(call, uintptr(id), second, third)
			if errno != 0 && errno != unix.EINVAL && errno != unix.EIDRM && errno != unix.EPERM {
				errs = append(errs, fmt.Errorf("SysV %s object %d could not be removed: %w", kind, id, errno))
			}
		}
	}
	return errors.Join(errs...)
}

// listIPC reads the ids in /proc/sysvipc; a kernel without it has none.
func listIPC(kind string) (ids []int, err error) {
	file, err := os.Open("/proc/sysvipc/" + kind)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("SysV objects cannot be listed: %w", err)
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	lines.Scan() // the head: key, id, …
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			continue
		}
		id, err := strconv.Atoi(fields[1])
		if err != nil {
			return ids, fmt.Errorf("SysV objects cannot be listed: %w", err)
		}
		ids = append(ids, id)
	}
	return ids, lines.Err()
}
