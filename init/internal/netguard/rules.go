package netguard

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// tableName is the one table of netguard, in family inet (IPv4 and IPv6).
const tableName = "agent_sandbox"

// chain is a base chain: a list of rules at a hook, and what happens to a packet that none of them decided.
type chain struct {
	name   string
	hook   uint32
	policy uint32
	rules  []rule
}

// rule is a list of expressions, all of which must match until one gives a verdict.
type rule []expression

// expression is one step of a rule: its kernel name and its encoded attributes.
type expression struct {
	name  string
	attrs []byte
}

const (
	nfAccept = 1
	nfDrop   = 0
	portDNS  = 53
)

// ICMPv6 types without which IPv6 does not work on a link: they go to link-local and multicast addresses, which are usually blocked.
// Only the kernel can send them, since the sandbox has no CAP_NET_RAW.
var (
	linkOutput = []byte{131, 132, 133, 135, 136, 143} // listener reports and done, router solicitation, neighbour solicitation and advertisement
	linkInput  = []byte{135, 136}
)

// chains turns a config into the whole table.
func chains(c Config) []chain {
	output := []rule{{meta(unix.NFT_META_OIFNAME), equalName("lo"), verdict(nfAccept)}}
	for _, kind := range linkOutput {
		output = append(output, icmp6(kind))
	}
	for _, resolver := range c.Resolvers {
		for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r := destination(netip.PrefixFrom(resolver, resolver.BitLen()))
			r = append(r, meta(unix.NFT_META_L4PROTO), equal([]byte{protocol}), payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2),
				equal(binary.BigEndian.AppendUint16(nil, portDNS)), verdict(nfAccept))
			output = append(output, r)
		}
	}
	for _, prefix := range c.Block {
		// Rejected, not dropped: a program in the sandbox fails at once instead of waiting for its own time-out.
		output = append(output, append(destination(prefix), reject()))
	}
	input := []rule{
		{meta(unix.NFT_META_IIFNAME), equalName("lo"), verdict(nfAccept)},
		{connectionState(), anyBit(stateEstablished | stateRelated), notEqual(make([]byte, 4)), verdict(nfAccept)},
	}
	for _, kind := range linkInput {
		input = append(input, icmp6(kind))
	}
	return []chain{
		{name: "output", hook: unix.NF_INET_LOCAL_OUT, policy: nfAccept, rules: output},
		{name: "input", hook: unix.NF_INET_LOCAL_IN, policy: nfDrop, rules: input},
	}
}

// destination matches packets to a network.
func destination(p netip.Prefix) rule {
	bits, family, offset := 32, byte(unix.NFPROTO_IPV4), uint32(16)
	if p.Addr().Is6() {
		bits, family, offset = 128, unix.NFPROTO_IPV6, 24
	}
	r := rule{meta(unix.NFT_META_NFPROTO), equal([]byte{family})}
	if p.Bits() == 0 {
		return r
	}
	r = append(r, payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(bits/8)))
	if p.Bits() < bits {
		r = append(r, mask(prefixMask(p.Bits(), bits/8)))
	}
	return append(r, equal(p.Addr().AsSlice()))
}

func prefixMask(ones, size int) []byte {
	m := make([]byte, size)
	for i := range ones {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

func icmp6(kind byte) rule {
	return rule{
		meta(unix.NFT_META_NFPROTO), equal([]byte{unix.NFPROTO_IPV6}), meta(unix.NFT_META_L4PROTO), equal([]byte{unix.IPPROTO_ICMPV6}),
		payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1), equal([]byte{kind}), verdict(nfAccept),
	}
}

// Connection states as bits: 1 << (IP_CT_x + 1).
const (
	stateEstablished = 1 << 1
	stateRelated     = 1 << 2
)

func meta(key uint32) expression {
	return expression{"meta", join(attr32(unix.NFTA_META_KEY, key), attr32(unix.NFTA_META_DREG, unix.NFT_REG_1))}
}

func equal(data []byte) expression    { return compare(unix.NFT_CMP_EQ, data) }
func notEqual(data []byte) expression { return compare(unix.NFT_CMP_NEQ, data) }

// equalName compares an interface name, which fills the whole register of 16 bytes.
func equalName(name string) expression {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return equal(data)
}

func compare(op uint32, data []byte) expression {
	return expression{"cmp", join(attr32(unix.NFTA_CMP_SREG, unix.NFT_REG_1), attr32(unix.NFTA_CMP_OP, op), value(unix.NFTA_CMP_DATA, data))}
}

func payload(base, offset, size uint32) expression {
	return expression{"payload", join(attr32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1), attr32(unix.NFTA_PAYLOAD_BASE, base),
		attr32(unix.NFTA_PAYLOAD_OFFSET, offset), attr32(unix.NFTA_PAYLOAD_LEN, size))}
}

func mask(m []byte) expression {
	return expression{"bitwise", join(attr32(unix.NFTA_BITWISE_SREG, unix.NFT_REG_1), attr32(unix.NFTA_BITWISE_DREG, unix.NFT_REG_1),
		attr32(unix.NFTA_BITWISE_LEN, uint32(len(m))), value(unix.NFTA_BITWISE_MASK, m), value(unix.NFTA_BITWISE_XOR, make([]byte, len(m))))}
}

func connectionState() expression {
	return expression{"ct", join(attr32(unix.NFTA_CT_KEY, unix.NFT_CT_STATE), attr32(unix.NFTA_CT_DREG, unix.NFT_REG_1))}
}

// anyBit keeps the given bits of a state, which the kernel has in its own byte order.
func anyBit(bits uint32) expression { return mask(binary.NativeEndian.AppendUint32(nil, bits)) }

func verdict(code uint32) expression {
	return expression{"immediate", join(attr32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT),
		nested(unix.NFTA_IMMEDIATE_DATA, nested(unix.NFTA_DATA_VERDICT, attr32(unix.NFTA_VERDICT_CODE, code))))}
}

func reject() expression {
	return expression{"reject", join(attr32(unix.NFTA_REJECT_TYPE, unix.NFT_REJECT_ICMPX_UNREACH),
		attr(unix.NFTA_REJECT_ICMP_CODE, []byte{unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}))}
}

func value(kind uint16, data []byte) []byte { return nested(kind, attr(unix.NFTA_DATA_VALUE, data)) }
