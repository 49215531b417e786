package netguard

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
)

// Bounds of a config: far above what is needed, low enough that the rules fit one netlink message.
const (
	maxBlock     = 256
	maxResolvers = 16
)

// Config is what is closed, and the resolvers that stay open all the same.
type Config struct {
	Block     []netip.Prefix
	Resolvers []netip.Addr
}

// ParseConfig reads the base64 JSON of the command line. Unknown keys are refused: a rule that was meant and not made is a hole.
func ParseConfig(encoded string) (Config, error) {
	var c Config
	text, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return c, fmt.Errorf("--config is not base64: %w", err)
	}
	var raw struct {
		Block     []string `json:"block"`
		Resolvers []string `json:"resolvers"`
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&raw); err != nil {
		return c, fmt.Errorf("--config is not the expected JSON: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return c, fmt.Errorf("--config has text after its JSON object")
	}
	for _, s := range raw.Block {
		prefix, err := parsePrefix(s)
		if err != nil {
			return c, err
		}
		c.Block = append(c.Block, prefix)
	}
	for _, s := range raw.Resolvers {
		addr, err := netip.ParseAddr(s)
		if err != nil || addr.Zone() != "" {
			return c, fmt.Errorf("resolver %q is not an IP address", s)
		}
		c.Resolvers = append(c.Resolvers, addr.Unmap())
	}
	c.Block = sorted(c.Block, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	c.Resolvers = sorted(c.Resolvers, netip.Addr.Compare)
	switch {
	case len(c.Block) == 0:
		return c, fmt.Errorf("--config blocks nothing: name the networks to close in \"block\"")
	case len(c.Block) > maxBlock:
		return c, fmt.Errorf("--config blocks %d networks, at most %d are allowed", len(c.Block), maxBlock)
	case len(c.Resolvers) > maxResolvers:
		return c, fmt.Errorf("--config has %d resolvers, at most %d are allowed", len(c.Resolvers), maxResolvers)
	}
	return c, nil
}

// parsePrefix reads "10.0.0.0/8", or an address, which is a network of its own; bits behind the mask are cut off.
func parsePrefix(s string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		return prefix, fmt.Errorf("block entry %q is not a network such as 10.0.0.0/8", s)
	}
	if prefix.Addr().Is4In6() {
		return prefix, fmt.Errorf("block entry %q is an IPv4 network written as IPv6: write it as IPv4", s)
	}
	return prefix.Masked(), nil
}

// sorted returns the distinct values of s in order, so that the same config always makes the same rules.
func sorted[T comparable](s []T, compare func(T, T) int) []T {
	slices.SortFunc(s, compare)
	return slices.Compact(s)
}
