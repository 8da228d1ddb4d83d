"""A model of timm learns to tell clothes apart: first its new head alone, then all of it.

pip install timm
stoker train examples/timm_images.py
stoker train examples/timm_images.py --set name=resnet18 --set pretrained=true
"""

import stoker


def job(name: str = "test_resnet", epochs: int = 2, *, pretrained: bool = False) -> stoker.Job:
    """The model that timm calls `name`, for one channel and ten classes."""
    import timm

    train, test = stoker.data.images()
    head = f"{timm.get_pretrained_cfg(name).classifier}.*"
    return stoker.Job(
        model=lambda: timm.create_model(name, in_chans=1, num_classes=10, pretrained=pretrained),
        data=train,
        valid=stoker.holdout(0.1),
        test=test,
        freeze=stoker.Freeze({"*": stoker.epochs(0.5)}, but=(head,)) if pretrained else None,
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=2e-3),
        schedule=stoker.schedules.warmup_cosine(),
        batch=128,
        until=stoker.epochs(epochs),
    )
