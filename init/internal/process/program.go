package process

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	standardPath   = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	notFound       = 127
	notExecutable  = 126
	maxInterpreter = 255 // the kernel reads that much of a first line
)

// startFailure is a start that failed as a shell would report it.
type startFailure struct {
	code    int
	message string
}

// find looks the program up as execvp(3) does, in the command's own PATH.
func (s *spec) find(env []string) (string, *startFailure) {
	name := s.Argv[0]
	if strings.Contains(name, "/") {
		path := name
		if !filepath.IsAbs(path) {
			path = filepath.Join(s.Cwd, path)
		}
		return path, s.checkProgram(name, path)
	}
	list := standardPath
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			list = value
		}
	}
	var denied *startFailure
	for _, dir := range filepath.SplitList(list) {
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(s.Cwd, dir)
		}
		candidate := filepath.Join(dir, name)
		info, err := os.Stat(candidate)
		if err != nil || info.IsDir() {
			continue
		}
		failure := s.checkProgram(name, candidate)
		if failure == nil {
			return candidate, nil
		}
		denied = failure
	}
	if denied != nil {
		return "", denied
	}
	return "", &startFailure{notFound, shown(name) + ": command not found in PATH"}
}

func (s *spec) checkProgram(name, path string) *startFailure {
	info, err := os.Stat(path)
	name = shown(name)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		if s.Command != nil {
			return &startFailure{notFound, shell + ": not found: this image has no shell, so give the command as a list of arguments"}
		}
		return &startFailure{notFound, name + ": no such file"}
	case err != nil:
		return &startFailure{notExecutable, name + ": cannot be executed: " + errnoText(err)}
	case info.IsDir():
		return &startFailure{notExecutable, name + ": is a directory"}
	case unix.Access(path, unix.X_OK) != nil:
		return &startFailure{notExecutable, name + ": permission denied: it is not executable"}
	}
	return nil
}

// failureOf maps what fork or execve said about a program. A body that is at fault is an *apierr.Error instead.
func failureOf(s *spec, path string, env []string, err error) (*startFailure, error) {
	name := shown(s.Argv[0])
	switch {
	case errors.Is(err, syscall.E2BIG):
		total := 0
		for _, entry := range append(env, s.Argv...) {
			total += len(entry) + 9
		}
		return nil, tooLarge(total)
	case errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR):
		if needed := interpreter(path); needed != "" {
			return &startFailure{notFound, name + ": its interpreter " + shown(needed) + " is missing: install that, or correct the program's first line"}, nil
		}
		return &startFailure{notFound, name + ": no such file, or its interpreter is missing"}, nil
	case errors.Is(err, syscall.EAGAIN):
		return &startFailure{notExecutable, name + ": no room in the process limit of the sandbox: end other processes, or ask for a larger pids_limit"}, nil
	case errors.Is(err, syscall.ENOMEM):
		return &startFailure{notExecutable, name + ": no memory to start it: end other processes, or ask for more memory_mb"}, nil
	case errors.Is(err, syscall.ENOEXEC):
		return &startFailure{notExecutable, name + ": is no program this machine can run (a script needs a first line like #!/bin/sh)"}, nil
	}
	return &startFailure{notExecutable, name + ": cannot be executed: " + errnoText(err)}, nil
}

func errnoText(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// interpreter names what the kernel lacked to run the file: the program of a script's first line, the loader of an ELF file, or what those need in
// turn. "" when that cannot be told.
func interpreter(path string) string {
	const depth = 4 // of scripts that run scripts: the kernel's own limit
	for range depth {
		file, err := os.Open(path)
		if err != nil {
			return ""
		}
		needed := readInterpreter(file)
		_ = file.Close()
		if needed == "" {
			return ""
		}
		if _, err := os.Stat(needed); err != nil {
			return needed
		}
		path = needed
	}
	return ""
}

func readInterpreter(file io.ReaderAt) string {
	var head [maxInterpreter]byte
	n, _ := file.ReadAt(head[:], 0)
	if line, ok := bytes.CutPrefix(head[:n], []byte("#!")); ok {
		line, _, _ = bytes.Cut(line, []byte{'\n'})
		if words := bytes.Fields(line); len(words) > 0 {
			return string(words[0])
		}
		return ""
	}
	return loader(file, head[:n])
}

// loader reads PT_INTERP of a 64-bit little-endian ELF file: the only kind that both supported machines run by themselves.
func loader(file io.ReaderAt, head []byte) string {
	const headerSize, entrySize, interpreterEntry = 64, 56, 3
	if len(head) < headerSize || !bytes.HasPrefix(head, []byte("\x7fELF\x02\x01")) {
		return ""
	}
	at := int64(binary.LittleEndian.Uint64(head[32:]))
	count := int64(binary.LittleEndian.Uint16(head[56:]))
	for i := range count {
		var entry [entrySize]byte
		if _, err := file.ReadAt(entry[:], at+i*entrySize); err != nil {
			return ""
		}
		if binary.LittleEndian.Uint32(entry[:]) != interpreterEntry {
			continue
		}
		size := min(binary.LittleEndian.Uint64(entry[32:]), maxInterpreter)
		name := make([]byte, size)
		n, _ := file.ReadAt(name, int64(binary.LittleEndian.Uint64(entry[8:])))
		name, _, _ = bytes.Cut(name[:n], []byte{0})
		return string(name)
	}
	return ""
}
