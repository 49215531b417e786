// NetworkPolicy enforcement by kube-router's policy controller alone: iptables and ipset, no kernel queue. kube-router's own command would
// compile BGP, IPVS and two container runtimes' clients that nothing here uses.
package main

import (
	"context"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Rules are written at each event; the period only heals what somebody else removed.
const syncPeriod = 10 * time.Second

func main() {
	config := options.NewKubeRouterConfig()
	config.EnableIPv4 = true
	config.IPTablesSyncPeriod = syncPeriod
	pflag.StringVar(&config.Kubeconfig, "kubeconfig", "", "how to reach the API server")
	pflag.StringVar(&config.HostnameOverride, "node", "", "name of the node whose pods are guarded")
	pflag.StringSliceVar(&config.ClusterIPCIDRs, "services", nil, "address range of the services")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, config); err != nil {
		klog.ErrorS(err, "The firewall cannot work")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

// run enforces policies until ctx ends.
func run(ctx context.Context, config *options.KubeRouterConfig) error {
	rest, err := clientcmd.BuildConfigFromFlags("", config.Kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	controller, err := netpol.NewNetworkPolicyController(client, config, pods, policies, namespaces, &sync.Mutex{}, tables, sets)
	if err != nil {
		return err
	}
	if _, err := pods.AddEventHandler(controller.PodEventHandler); err != nil {
		return err
	}
	if _, err := namespaces.AddEventHandler(controller.NamespaceEventHandler); err != nil {
		return err
	}
	if _, err := policies.AddEventHandler(controller.NetworkPolicyEventHandler); err != nil {
		return err
	}
	// The controller blocks on its heartbeats: somebody must take them.
	heartbeats := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for range heartbeats {
		}
	}()
	var group sync.WaitGroup
	group.Add(1)
	go controller.Run(heartbeats, ctx.Done(), &group)
	group.Wait()
	return nil
}
