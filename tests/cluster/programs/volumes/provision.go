package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

// smallest is what mkfs.ext4 needs to make a journalled file system with room in it.
const smallest = 16 << 20

// provision makes and deletes volumes of both classes until ctx ends.
func provision(ctx context.Context, client kubernetes.Interface, s settings) {
	var group sync.WaitGroup
	for name, provisioner := range map[string]controller.Provisioner{fastDriver: fast{s.local}, diskDriver: disk{s.folder}} {
		group.Add(1)
		go func() {
			defer group.Done()
			controller.NewProvisionController(ctx, client, name, provisioner,
				controller.LeaderElection(false),
				controller.Threadiness(8),
				controller.ResyncPeriod(time.Minute),
				// Retry for ever: a test may repair what was wrong.
				controller.FailedProvisionThreshold(0),
				controller.FailedDeleteThreshold(0),
			).Run(ctx)
		}()
	}
	group.Wait()
}

// volume is what both classes have in common.
func volume(options controller.ProvisionOptions, source core.PersistentVolumeSource) *core.PersistentVolume {
	return &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: options.PVName},
		Spec: core.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   options.PVC.Spec.AccessModes,
			MountOptions:                  options.StorageClass.MountOptions,
			Capacity:                      core.ResourceList{core.ResourceStorage: options.PVC.Spec.Resources.Requests[core.ResourceStorage]},
			PersistentVolumeSource:        source,
		},
	}
}

// refused says why a claim cannot be met by these classes, or nil.
func refused(options controller.ProvisionOptions) error {
	if mode := options.PVC.Spec.VolumeMode; mode != nil && *mode == core.PersistentVolumeBlock {
		return fmt.Errorf("volumes of class %s are file systems, not block devices", options.StorageClass.Name)
	}
	for _, mode := range options.PVC.Spec.AccessModes {
		if mode != core.ReadWriteOnce && mode != core.ReadWriteOncePod {
			return fmt.Errorf("volumes of class %s are used by one node at a time: ReadWriteOnce or ReadWriteOncePod, not %s", options.StorageClass.Name, mode)
		}
	}
	return nil
}

type fast struct{ folder string }

// Provision makes a folder. All nodes of a test cluster see one file system, so no helper pod has to do that on the node.
func (f fast) Provision(_ context.Context, options controller.ProvisionOptions) (*core.PersistentVolume, controller.ProvisioningState, error) {
	if err := refused(options); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	if options.SelectedNodeName == "" {
		return nil, controller.ProvisioningFinished, fmt.Errorf("class %s needs volumeBindingMode WaitForFirstConsumer: a folder belongs to a node", options.StorageClass.Name)
	}
	path := filepath.Join(f.folder, options.PVName)
	if err := os.MkdirAll(path, 0o777); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	// mkdir's mode is cut by the umask; pods of any user may write, like with local-path.
	if err := os.Chmod(path, 0o777); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	made := volume(options, core.PersistentVolumeSource{Local: &core.LocalVolumeSource{Path: path}})
	made.Spec.NodeAffinity = &core.VolumeNodeAffinity{Required: &core.NodeSelector{NodeSelectorTerms: []core.NodeSelectorTerm{{
		MatchExpressions: []core.NodeSelectorRequirement{{
			Key: core.LabelHostname, Operator: core.NodeSelectorOpIn, Values: []string{options.SelectedNodeName},
		}},
	}}}}
	return made, controller.ProvisioningFinished, nil
}

// Delete removes the folder with everything in it.
func (f fast) Delete(_ context.Context, gone *core.PersistentVolume) error {
	return os.RemoveAll(filepath.Join(f.folder, gone.Name))
}

type disk struct{ folder string }

// Provision makes a file of the claim's size with a file system in it.
func (d disk) Provision(ctx context.Context, options controller.ProvisionOptions) (*core.PersistentVolume, controller.ProvisioningState, error) {
	if err := refused(options); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	request := options.PVC.Spec.Resources.Requests[core.ResourceStorage]
	path := diskPath(d.folder, options.PVName)
	if err := makeDisk(ctx, path, max(request.Value(), smallest)); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	return volume(options, core.PersistentVolumeSource{CSI: &core.CSIPersistentVolumeSource{
		Driver: diskDriver, VolumeHandle: options.PVName, FSType: "ext4",
	}}), controller.ProvisioningFinished, nil
}

// Delete removes the file.
func (d disk) Delete(_ context.Context, gone *core.PersistentVolume) error {
	if err := os.Remove(diskPath(d.folder, gone.Name)); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

func diskPath(folder, handle string) string {
	return filepath.Join(folder, handle+".ext4")
}

// makeDisk is repeatable: a file under its final name is whole.
func makeDisk(ctx context.Context, path string, size int64) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	unfinished := path + ".new"
	file, err := os.Create(unfinished)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Truncate(size); err != nil {
		return err
	}
	if said, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", unfinished).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.ext4 failed: %w: %s", err, said)
	}
	return os.Rename(unfinished, path)
}
