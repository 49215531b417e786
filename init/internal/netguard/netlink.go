package netguard

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Netlink attributes: 2 bytes length, 2 bytes type, data, padded to 4. nf_tables numbers are big endian.

const (
	attrHeader = 4
	typeMask   = 0x3fff // without the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER
)

func attr(kind uint16, data []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(attrHeader+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func attr32(kind uint16, v uint32) []byte {
	return attr(kind, binary.BigEndian.AppendUint32(nil, v))
}

func attrText(kind uint16, s string) []byte { return attr(kind, append([]byte(s), 0)) }

func nested(kind uint16, parts ...[]byte) []byte {
	return attr(kind|unix.NLA_F_NESTED, join(parts...))
}

func join(parts ...[]byte) []byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

var errDamaged = errors.New("damaged netlink attributes")

// each calls f for every attribute in b.
func each(b []byte, f func(kind uint16, data []byte) error) error {
	for len(b) > 0 {
		if len(b) < attrHeader {
			return errDamaged
		}
		size := int(binary.NativeEndian.Uint16(b))
		if size < attrHeader || size > len(b) {
			return errDamaged
		}
		if err := f(binary.NativeEndian.Uint16(b[2:])&typeMask, b[attrHeader:size]); err != nil {
			return err
		}
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}

// message is one request: an nf_tables type (or a batch mark) with its attributes.
type message struct {
	kind   uint16
	flags  uint16
	family byte
	res    uint16
	attrs  []byte
	what   string // for the error text
}

func subsystem(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

func (m message) encode(seq uint32) []byte {
	size := unix.NLMSG_HDRLEN + 4 + len(m.attrs)
	b := binary.NativeEndian.AppendUint32(nil, uint32(size))
	b = binary.NativeEndian.AppendUint16(b, m.kind)
	b = binary.NativeEndian.AppendUint16(b, m.flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, m.family, unix.NFNETLINK_V0)
	b = binary.BigEndian.AppendUint16(b, m.res)
	return append(b, m.attrs...)
}

// connection is a netlink socket in the current network namespace.
type connection struct {
	fd  int
	seq uint32
	buf []byte
}

func dial() (*connection, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("this kernel has no netfilter netlink socket (%w): use a kernel with nf_tables, or create the sandbox with network=false", err)
	}
	c := &connection{fd: fd, seq: 1, buf: make([]byte, 64<<10)}
	// The kernel answers at once or never: a bound, so that a create cannot hang.
	limit := unix.Timeval{Sec: 5}
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		c.close()
		return nil, fmt.Errorf("netlink socket could not be set up: %w", err)
	}
	return c, nil
}

func (c *connection) close() { _ = unix.Close(c.fd) }

func (c *connection) send(b []byte) error {
	if err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("netlink send failed: %w", err)
	}
	return nil
}

// receive calls f for each message from the kernel until f says done.
func (c *connection) receive(f func(kind uint16, seq uint32, data []byte) (done bool, err error)) error {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("netlink gave no answer: %w", err)
		}
		for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.NLMSG_HDRLEN || size > len(b) {
				return errDamaged
			}
			done, err := f(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:size])
			if done || err != nil {
				return err
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// errno reads the result in an NLMSG_ERROR; nil is an acknowledgement.
func errno(data []byte) error {
	if len(data) < 4 {
		return errDamaged
	}
	if code := int32(binary.NativeEndian.Uint32(data)); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}

// commit runs the messages as one transaction: all of them or none.
func (c *connection) commit(messages []message) error {
	mark := func(kind uint16) message {
		return message{kind: kind, family: unix.AF_UNSPEC, res: unix.NFNL_SUBSYS_NFTABLES}
	}
	first := c.seq
	b := mark(unix.NFNL_MSG_BATCH_BEGIN).encode(first)
	for i, m := range messages {
		if i == len(messages)-1 {
			m.flags |= unix.NLM_F_ACK
		}
		b = append(b, m.encode(first+1+uint32(i))...)
	}
	last := first + uint32(len(messages))
	b = append(b, mark(unix.NFNL_MSG_BATCH_END).encode(last+1)...)
	c.seq = last + 2
	if err := c.send(b); err != nil {
		return err
	}
	return c.receive(func(kind uint16, seq uint32, data []byte) (bool, error) {
		if kind != unix.NLMSG_ERROR || seq < first || seq > last+1 {
			return false, nil
		}
		if err := errno(data); err != nil {
			if i := int(seq-first) - 1; i >= 0 && i < len(messages) {
				return true, fmt.Errorf("the kernel refused %s: %w", messages[i].what, err)
			}
			return true, fmt.Errorf("the kernel refused the transaction: %w", err)
		}
		return seq == last, nil
	})
}

// dump asks for all objects of a kind and calls f with the attributes of each.
func (c *connection) dump(kind uint16, family byte, attrs []byte, f func(data []byte) error) error {
	c.seq++
	seq := c.seq
	if err := c.send(message{kind: subsystem(kind), flags: unix.NLM_F_DUMP, family: family, attrs: attrs}.encode(seq)); err != nil {
		return err
	}
	return c.receive(func(kind uint16, got uint32, data []byte) (bool, error) {
		if got != seq {
			return false, nil
		}
		switch {
		case kind == unix.NLMSG_DONE:
			return true, nil
		case kind == unix.NLMSG_ERROR:
			return true, errno(data)
		case len(data) < 4:
			return true, errDamaged
		}
		return false, f(data[4:])
	})
}
