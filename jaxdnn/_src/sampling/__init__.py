"""Images sampled at the points of a grid, and what is made of them: transformers, warps, regions, windows."""

from jaxdnn._src.core.manifest import Manifest, Ops

MANIFEST = Manifest(
    ops=(
        Ops(
            "SpatialTfGridGenerator, SpatialTfSampler, both directions",
            "`portable`; gradients `mesh_invariant`",
            "grid_sample affine_grid spatial_transformer warp map_coordinates roi_align deform_conv",
        ),
    ),
    examples="""
grid_sample         | NHWC, NTDP, padding="reflection" -> NTDC | N -/- TD -/g3 C -/g2 HW g/g | any pixel may be read
affine_grid         | NPR, shape(TD) -> NTDP                   | N -/- | rows of matrices
spatial_transformer | NHWC, NPR, sizes=shape(TD) -> NTDC       | N -/- C -/g2 HW g/g | as grid_sample
warp                | NHWC, NTDP, padding="border" -> NTDC     | N -/- TD -/g3 C -/g2 HW g/g | as grid_sample
map_coordinates     | HW, PTD, order=1, mode="nearest" -> TD   | TD -/g3 H g2/g2h W g/g | any element may be read
roi_align           | NWC, NTP, output_sizes=size(R), layout="NWC" -> NTRC | N -/- T -/g3 C -/g2 W g/g | as grid_sample
deform_conv         | NWC, NWR, RCK, padding=1, layout="NWC" -> NWK | NK -/+      | filters add over pixels
""",
    engines=("hopper.engine", "xla"),
    cases=("cases", "cases_composed"),
    timed="timed",
)
