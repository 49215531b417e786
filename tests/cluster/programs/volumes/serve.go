package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/mount-utils"
)

// serve is the node's side of the class disk: the CSI services and the socket by which the kubelet finds them.
func serve(ctx context.Context, s settings) error {
	endpoint := filepath.Join(s.kubelet, "plugins", diskDriver, "csi.sock")
	services := grpc.NewServer()
	csi.RegisterIdentityServer(services, identity{})
	csi.RegisterNodeServer(services, &node{name: s.node, folder: s.folder, mounter: mount.New("")})
	register := grpc.NewServer()
	registration.RegisterRegistrationServer(register, registrar{endpoint: endpoint})

	failed := make(chan error, 2)
	for path, server := range map[string]*grpc.Server{
		endpoint: services,
		filepath.Join(s.kubelet, "plugins_registry", diskDriver+"-reg.sock"): register,
	} {
		listener, err := listen(path)
		if err != nil {
			return err
		}
		go func() { failed <- server.Serve(listener) }()
	}
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		register.Stop()
		services.Stop()
		return nil
	}
}

// listen takes over the path of a socket that an earlier process left.
func listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.Listen("unix", path)
}

type registrar struct {
	registration.UnsafeRegistrationServer
	endpoint string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: diskDriver, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, told *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	klog.InfoS("The kubelet has answered", "registered", told.PluginRegistered, "error", told.Error)
	return &registration.RegistrationStatusResponse{}, nil
}

type identity struct {
	csi.UnimplementedIdentityServer
}

func (identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: diskDriver, VendorVersion: "1"}, nil
}

func (identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{}, nil
}

func (identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

type node struct {
	csi.UnimplementedNodeServer
	name    string
	folder  string
	mounter mount.Interface
}

func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: n.name}, nil
}

func (n *node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	stage := &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{Type: stage}}}, nil
}

// NodeStageVolume mounts the disk once on this node, however many of its pods use it: two loop devices over one file would ruin it.
func (n *node) NodeStageVolume(_ context.Context, request *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	options := append([]string{"loop"}, request.GetVolumeCapability().GetMount().GetMountFlags()...)
	source := diskPath(n.folder, filepath.Base(request.GetVolumeId()))
	if _, err := os.Stat(source); err != nil {
		return nil, status.Errorf(codes.NotFound, "volume %s: %v", request.GetVolumeId(), err)
	}
	return &csi.NodeStageVolumeResponse{}, n.mountOnce(source, request.GetStagingTargetPath(), "ext4", options)
}

func (n *node) NodeUnstageVolume(_ context.Context, request *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, n.unmount(request.GetStagingTargetPath())
}

func (n *node) NodePublishVolume(_ context.Context, request *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	options := []string{"bind"}
	if request.GetReadonly() {
		options = append(options, "ro")
	}
	return &csi.NodePublishVolumeResponse{}, n.mountOnce(request.GetStagingTargetPath(), request.GetTargetPath(), "", options)
}

func (n *node) NodeUnpublishVolume(_ context.Context, request *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, n.unmount(request.GetTargetPath())
}

func (n *node) mountOnce(source, target, kind string, options []string) error {
	if err := os.MkdirAll(target, 0o750); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	mounted, err := n.mounter.IsMountPoint(target)
	if err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if mounted {
		return nil
	}
	if err := n.mounter.Mount(source, target, kind, options); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}

func (n *node) unmount(target string) error {
	if err := mount.CleanupMountPoint(target, n.mounter, true); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}
