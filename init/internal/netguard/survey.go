package netguard

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
)

const (
	resolvConf    = "/etc/resolv.conf"
	maxResolvConf = 1 << 20
)

// survey prints what a config for this network would need to know: every address of the current network namespace, and its resolvers.
// The Docker backend runs it in the network namespace of the engine.
func survey(stdout io.Writer) int {
	found, err := look()
	if err != nil {
		return fail(stdout, "survey_failed", err)
	}
	if err := print(stdout, found); err != nil {
		return 1
	}
	return 0
}

func look() (map[string][]netip.Addr, error) {
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("the addresses of this network cannot be read: %w", err)
	}
	addresses := []netip.Addr{}
	for _, one := range interfaces {
		network, ok := one.(*net.IPNet)
		if !ok {
			return nil, fmt.Errorf("the address %s has a form that is not known", one)
		}
		address, ok := netip.AddrFromSlice(network.IP)
		if !ok {
			return nil, fmt.Errorf("the address %s has a form that is not known", one)
		}
		addresses = append(addresses, address.Unmap())
	}
	file, err := os.Open(resolvConf)
	if err != nil {
		return nil, fmt.Errorf("the resolvers of this network cannot be read: %w", err)
	}
	defer file.Close()
	resolvers, err := parseResolvers(io.LimitReader(file, maxResolvConf))
	if err != nil {
		return nil, fmt.Errorf("%s cannot be read: %w", resolvConf, err)
	}
	return map[string][]netip.Addr{"addresses": addresses, "resolvers": resolvers}, nil
}

// parseResolvers reads the nameserver lines of a resolv.conf; what is no address there is what a resolver library ignores too.
func parseResolvers(r io.Reader) ([]netip.Addr, error) {
	resolvers := []netip.Addr{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if address, err := netip.ParseAddr(fields[1]); err == nil {
			resolvers = append(resolvers, address.WithZone("").Unmap())
		}
	}
	return resolvers, lines.Err()
}
