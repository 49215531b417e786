// Volumes for tests, without helper pods, in two classes of one program:
//
//	fast  a folder of the node as a "local" volume: bound in milliseconds, stays on its node
//	disk  an ext4 file system in a file of the volume's size, behind CSI and VolumeAttachments: like a cloud's disk it has a real
//	      capacity and a lost+found, follows its pod to another node, and is attached to one node at a time
//
// "volumes provision" runs once in a cluster, "volumes serve" on each node.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

const (
	fastDriver = "fast.volumes.test"
	diskDriver = "disk.volumes.test"
)

type settings struct {
	kubeconfig string
	folder     string
	local      string
	node       string
	kubelet    string
}

func main() {
	var s settings
	pflag.StringVar(&s.kubeconfig, "kubeconfig", "", "provision: how to reach the API server")
	pflag.StringVar(&s.folder, "folder", "", "where the disks lie, the same on every node")
	pflag.StringVar(&s.local, "local", "", "provision: where the folders of class fast lie, the same on every node")
	pflag.StringVar(&s.node, "node", "", "serve: name of this node")
	pflag.StringVar(&s.kubelet, "kubelet", "", "serve: the kubelet's root folder")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, pflag.Arg(0), s); err != nil {
		klog.ErrorS(err, "Volumes cannot work")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

func run(ctx context.Context, role string, s settings) error {
	switch role {
	case "serve":
		return serve(ctx, s)
	case "provision":
		for _, folder := range []string{s.folder, s.local} {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
		}
		config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
		if err != nil {
			return err
		}
		// Hundreds of claims at once are a test, not an accident.
		config.QPS, config.Burst = 200, 400
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}
		go attach(ctx, client)
		provision(ctx, client, s)
		return nil
	default:
		return fmt.Errorf("the role is provision or serve, not %q", role)
	}
}
