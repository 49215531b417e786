// Package tarfmt is the archive format of init/API.md, "Archives": a plain PAX tar with sparse files (GNU PAX 1.0), extended attributes and raw
// name bytes, and a digest over all that was written or read. It knows bytes only: no files, no workspace.
//
// The standard library's archive/tar writes no sparse files, refuses names that are not UTF-8 in PAX records, and reads dialects that a restore must
// not accept. The reader here accepts what the writer writes and nothing else.
package tarfmt

import (
	"errors"
	"fmt"
	"strings"
)

// Type is the kind of a member.
type Type byte

// The kinds of members. There are no others: devices, pipes and sockets are neither written nor read.
const (
	File      Type = '0'
	Hardlink  Type = '1'
	Symlink   Type = '2'
	Directory Type = '5'
)

const (
	extended = Type('x')
	block    = 512
	// MaxHeader bounds the records before a member, and so what a reader must hold for it (names, link targets, extended attributes).
	MaxHeader = 1 << 20
	// MaxSegments bounds the data segments of one sparse file: 1 MiB in memory.
	MaxSegments = 1 << 16
	maxName     = 255
	maxXattrs   = 1000
	maxRecords  = maxXattrs + 16
	maxOctal    = 1<<33 - 1 // 11 octal digits
)

// Segment is a piece of a sparse file that has data.
type Segment struct {
	Offset, Length int64
}

// Xattr is an extended attribute.
type Xattr struct {
	Name, Value string
}

// Header describes a member. Name is relative, without "." or "..", and has no slash at its end, for directories either.
type Header struct {
	Name     string
	Linkname string // target of a symlink (any bytes), or the earlier member that a hard link is
	Type     Type
	Mode     uint32 // permission bits and setuid, setgid, sticky
	Size     int64  // of the file, holes included
	Seconds  int64  // modification time, since 1970
	Nanos    int64
	Xattrs   []Xattr
	Sparse   bool
	Segments []Segment // of a sparse file, in order
}

// stored is how many bytes of data follow the header, without the map of a sparse file.
func (h *Header) stored() int64 {
	if h.Type != File {
		return 0
	}
	if !h.Sparse {
		return h.Size
	}
	n := int64(0)
	for _, s := range h.Segments {
		n += s.Length
	}
	return n
}

// ErrInvalid is the root of all that a reader can find wrong with an archive.
var ErrInvalid = errors.New("invalid archive")

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// CheckName refuses a name that could lead out of the folder in which an archive is unpacked, or that no directory can hold.
func CheckName(name string) error {
	switch {
	case name == "":
		return invalid("a member has no name")
	case name[0] == '/':
		return invalid("%s is absolute", quote(name))
	case strings.IndexByte(name, 0) >= 0:
		return invalid("%s has a NUL byte", quote(name))
	}
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "", part == ".", part == "..":
			return invalid("%s has an empty, \".\" or \"..\" part", quote(name))
		case len(part) > maxName:
			return invalid("%s has a part of more than %d bytes", quote(name), maxName)
		}
	}
	return nil
}

func quote(s string) string {
	const longest = 200
	if len(s) > longest {
		return fmt.Sprintf("%q…", s[:longest])
	}
	return fmt.Sprintf("%q", s)
}

// Keys of the extended records.
const (
	keyPath       = "path"
	keyLinkpath   = "linkpath"
	keySize       = "size"
	keyTime       = "mtime"
	keyCharset    = "hdrcharset"
	keyXattr      = "SCHILY.xattr."
	keyMajor      = "GNU.sparse.major"
	keyMinor      = "GNU.sparse.minor"
	keySparseName = "GNU.sparse.name"
	keyRealSize   = "GNU.sparse.realsize"
	binaryCharset = "BINARY"
)

// escapeKey and unescapeKey carry the names of extended attributes in keys, which end at "=" (as GNU tar does it).
var (
	escapeKey   = strings.NewReplacer("%", "%25", "=", "%3D")
	unescapeKey = strings.NewReplacer("%25", "%", "%3D", "=")
)
