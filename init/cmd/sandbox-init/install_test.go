package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestInstallLeavesAWholeBinaryThatEverybodyMayRunAndNobodyMayChange(t *testing.T) {
	folder := t.TempDir()
	// What a killed installer has left is in nobody's way.
	if err := os.WriteFile(filepath.Join(folder, "sandbox-init.tmp"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if code := install([]string{folder}); code != 0 {
			t.Fatalf("install ended with %d", code)
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	copied, err := os.ReadFile(filepath.Join(folder, "sandbox-init"))
	if err != nil || !bytes.Equal(self, copied) {
		t.Fatalf("the copy differs (%v)", err)
	}
	entries, _ := os.ReadDir(folder)
	info, err := os.Stat(filepath.Join(folder, "sandbox-init"))
	if err != nil || info.Mode().Perm() != 0o555 || len(entries) != 1 {
		t.Fatalf("mode %v, %d entries (%v)", info.Mode(), len(entries), err)
	}
	if install(nil) != 2 || install([]string{filepath.Join(folder, "none")}) != 1 {
		t.Fatal("a wrong call is not refused")
	}
}

func TestReachTellsOpenFromClosed(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	open := listener.Addr().String()
	if reach([]string{"--open", "--time=1s", open}) != 0 || reach([]string{"--time=1s", open}) != 1 {
		t.Fatal("an address that answers was not seen to")
	}
	_ = listener.Close()
	if reach([]string{"--time=5s", open}) != 0 || reach([]string{"--open", "--time=1s", open}) != 1 {
		t.Fatal("an address that does not answer was not seen not to")
	}
}
