package files

import (
	"encoding/base64"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// info is the FileInfo of the API: name and path are raw bytes.
type info struct {
	name string
	path string
	stat unix.Statx_t
}

// kind is the type of a file as the API names it.
func kind(mode uint16) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFLNK:
		return "symlink"
	}
	return "other"
}

// appendJSON writes the info by hand: a listing makes a million of them, and there is nothing in it that needs escaping.
func (i *info) appendJSON(b []byte) []byte {
	b = append(b, `{"name":"`...)
	b = base64.StdEncoding.AppendEncode(b, []byte(i.name))
	b = append(b, `","path":"`...)
	b = base64.StdEncoding.AppendEncode(b, []byte(i.path))
	b = append(b, `","type":"`...)
	b = append(b, kind(i.stat.Mode)...)
	b = append(b, `","size":`...)
	b = strconv.AppendUint(b, i.stat.Size, 10)
	b = fmt.Appendf(b, `,"mode":"%04o","mtime_ns":`, i.stat.Mode&0o7777)
	b = strconv.AppendInt(b, i.stat.Mtime.Sec*1_000_000_000+int64(i.stat.Mtime.Nsec), 10)
	return append(b, '}')
}
