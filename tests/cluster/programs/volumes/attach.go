package main

import (
	"context"
	"time"

	storage "k8s.io/api/storage/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// attach confirms the attachments that Kubernetes' own controller asks for. It asks for one node at a time: that is where a second node's
// "Multi-Attach error" comes from. A detachment needs no work here.
func attach(ctx context.Context, client kubernetes.Interface) {
	factory := informers.NewSharedInformerFactory(client, time.Minute)
	informer := factory.Storage().V1().VolumeAttachments().Informer()
	confirm := func(object any) {
		attachment, ok := object.(*storage.VolumeAttachment)
		if !ok || attachment.Spec.Attacher != diskDriver || attachment.Status.Attached || attachment.DeletionTimestamp != nil {
			return
		}
		_, err := client.StorageV1().VolumeAttachments().Patch(ctx, attachment.Name, types.MergePatchType,
			[]byte(`{"status":{"attached":true}}`), meta.PatchOptions{}, "status")
		if err != nil {
			// The next resync tries again.
			klog.ErrorS(err, "Attachment is not confirmed", "attachment", attachment.Name)
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    confirm,
		UpdateFunc: func(_, object any) { confirm(object) },
	})
	if err != nil {
		klog.ErrorS(err, "Attachments cannot be watched")
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
	factory.Start(ctx.Done())
}
