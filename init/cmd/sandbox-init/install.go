package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// install copies this binary into a folder, in one step. A cluster without image volumes gets it into a sandbox that way: an init container of an
// image that holds nothing else has no cp. It must not hide before: a process that nobody may trace may not read its own executable.
func install(args []string) int {
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: sandbox-init install FOLDER")
		return 2
	}
	if err := copySelf(filepath.Join(args[0], "sandbox-init")); err != nil {
		return fail("it cannot be installed", err)
	}
	return 0
}

func copySelf(target string) (err error) {
	source, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer source.Close()
	temporary := target + ".tmp"
	// A container that was killed half-way is started again.
	if err := os.Remove(temporary); err != nil && !os.IsNotExist(err) {
		return err
	}
	out, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temporary)
		}
	}()
	if _, err := io.Copy(out, source); err != nil {
		_ = out.Close()
		return err
	}
	if err := out.Chmod(0o555); err != nil {
		_ = out.Close()
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(temporary, target)
}
