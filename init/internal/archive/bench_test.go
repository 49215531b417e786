package archive

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentsandbox.dev/init/internal/tarfmt"
	"agentsandbox.dev/init/internal/tree"
)

// many makes a workspace of small files.
func many(b testing.TB, dir string, n int) {
	for i := range n {
		name := fmt.Sprintf("%s/d%03d/f%05d.txt", dir, i/100, i)
		if i%100 == 0 {
			must(b, os.Mkdir(filepath.Dir(name), 0o755))
		}
		must(b, os.WriteFile(name, []byte(strings.Repeat("x", 500)), 0o644))
	}
}

func BenchmarkSmallFiles(b *testing.B) {
	const n = 20_000
	dir := b.TempDir()
	must(b, os.Mkdir(dir+"/work", 0o755))
	many(b, dir+"/work", n)
	r, err := openRoot(dir+"/work", uint32(os.Getuid()))
	must(b, err)
	defer r.close()
	var archive bytes.Buffer
	must(b, pack(tarfmt.NewWriter(&archive), r, []byte("{}"), &watch{}))
	b.Run("archive", func(b *testing.B) {
		for b.Loop() {
			must(b, pack(tarfmt.NewWriter(io.Discard), r, []byte("{}"), &watch{}))
		}
		b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "files/s")
	})
	for _, name := range []string{"rollback, nothing changed", "rollback, everything changed", "fill"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				switch name {
				case "rollback, everything changed":
					must(b, filepath.Walk(dir+"/work", func(path string, fi os.FileInfo, err error) error {
						return errors.Join(err, os.Chtimes(path, time.Now(), time.Now()))
					}))
				case "fill":
					must(b, tree.Empty(r.fd, nil))
				}
				b.StartTimer()
				s, err := newStaging(r, func(string) {})
				must(b, err)
				u := &unpacker{root: r, in: tarfmt.NewReader(bytes.NewReader(archive.Bytes())), want: limits{1 << 40, 1 << 20, 1 << 40}, watch: &watch{}}
				begin := time.Now()
				must(b, u.run(s.new))
				s.unpacked = u.closed
				unpacked := time.Now()
				must(b, s.prepare())
				prepared := time.Now()
				must(b, s.swap())
				b.Logf("unpack %v, to the disk %v, exchange and removal %v", unpacked.Sub(begin), prepared.Sub(unpacked), time.Since(prepared))
				s.close()
			}
			b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "files/s")
		})
	}
}

func BenchmarkOneLargeFile(b *testing.B) {
	const size = 1 << 30
	dir := b.TempDir()
	must(b, os.Mkdir(dir+"/work", 0o755))
	f, err := os.Create(dir + "/work/big")
	must(b, err)
	block := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for range size / len(block) {
		_, err := f.Write(block)
		must(b, err)
	}
	must(b, f.Close())
	r, err := openRoot(dir+"/work", uint32(os.Getuid()))
	must(b, err)
	defer r.close()
	b.Run("archive", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			must(b, pack(tarfmt.NewWriter(io.Discard), r, []byte("{}"), &watch{}))
		}
	})
	b.Run("restore", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			in, out := io.Pipe()
			go func() { _ = out.CloseWithError(pack(tarfmt.NewWriter(out), r, []byte("{}"), &watch{})) }()
			s, err := newStaging(r, func(string) {})
			must(b, err)
			u := &unpacker{root: r, in: tarfmt.NewReader(in), want: limits{1 << 40, 1 << 20, 1 << 40}, watch: &watch{}}
			must(b, u.run(s.new))
			must(b, s.prepare())
			s.close()
			s.discard()
		}
	})
}
