//! Tests of layouts.

use super::*;

fn mesh() -> Arc<Mesh> {
    Arc::new(Mesh::new(&["x", "y", "z"], &[2, 3, 4]).unwrap())
}

#[test]
fn the_first_axis_of_a_spec_is_major() {
    let layout = Layout::new(mesh(), &[&["x", "y"][..]], &[]).unwrap();
    assert_eq!(layout.roles()[..2], [AxisRole::Cuts { dim: 0, weight: 3 }, AxisRole::Cuts { dim: 0, weight: 1 }]);
    let turned = Layout::new(mesh(), &[&["y", "x"][..]], &[]).unwrap();
    assert_eq!(turned.roles()[..2], [AxisRole::Cuts { dim: 0, weight: 1 }, AxisRole::Cuts { dim: 0, weight: 2 }]);
    assert_ne!(layout, turned);
}

#[test]
fn an_axis_is_used_once() {
    let twice = Layout::new(mesh(), &[&["x"][..], &["y", "x"]], &[]);
    assert_eq!(
        twice.unwrap_err().to_string(),
        "axes[1] uses axis \"x\", which axes[0] uses already; a mesh axis cuts at most one dim, once"
    );
    assert!(matches!(Layout::new(mesh(), &[&["x", "x"][..]], &[]), Err(Error::RepeatedAxis { .. })));
    assert!(matches!(Layout::new(mesh(), &[&["x"][..]], &["x"]), Err(Error::RepeatedAxis { .. })));
    assert!(matches!(Layout::new(mesh(), &[&["x"][..]], &["y", "y"]), Err(Error::RepeatedAxis { .. })));
    assert!(matches!(Layout::new(mesh(), &[&["w"][..]], &[]), Err(Error::UnknownAxis { .. })));
}

#[test]
fn axes_that_cut_nothing_replicate_unless_unreduced() {
    let layout = Layout::new(mesh(), &[&["y"][..]], &["z"]).unwrap();
    assert_eq!((layout.replicated_axes(), layout.unreduced_axes()), (vec![0], vec![2]));
}
