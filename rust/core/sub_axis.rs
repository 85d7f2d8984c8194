//! Sub-axes: the factors of a mesh axis (rule 2.8).
//!
//! An axis `tp` of size `n = m·k·r` has the sub-axis `tp:(m)k`, of size `k` after the major factor `m`; the coordinate of
//! `i` along it is `(i // r) % k`. Nothing but the mesh has to know of them. Factored at the places where the sub-axes of
//! a layout begin and end, an axis becomes several, and because the order is row-major the device indices stay as they
//! are: `tp = 8` with `tp:(1)4` is the pair of axes `tp:(1)4` and `tp:(4)2`. All other arithmetic is that of plain axes
//! over this *refined* mesh.

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    mesh::Mesh,
};

/// A mesh axis or a factor of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SubAxis {
    /// The position of the axis in the mesh.
    pub axis: usize,
    /// The product of the factors before it.
    pub before: i64,
    /// The size of the sub-axis.
    pub size: i64,
}

impl SubAxis {
    /// The sub-axis that `name` spells, or the whole axis of that name, which goes first; `place` gives the name of
    /// the argument.
    ///
    /// # Errors
    /// [`Error::UnknownAxis`] if it is neither, [`Error::SubAxisSize`] if it does not divide its axis.
    ///
    /// ```
    /// use shardwise_core::{mesh::Mesh, sub_axis::SubAxis};
    /// let mesh = Mesh::new(&["dp", "tp"], &[2, 8])?;
    /// assert_eq!(SubAxis::named(&mesh, "tp:(2)4", || "axes[0]".to_owned())?, SubAxis { axis: 1, before: 2, size: 4 });
    /// assert_eq!(SubAxis::named(&mesh, "tp", || "axes[0]".to_owned())?, SubAxis { axis: 1, before: 1, size: 8 });
    /// assert!(SubAxis::named(&mesh, "tp:(2)3", || "axes[0]".to_owned()).is_err());
    /// # Ok::<(), shardwise_core::error::Error>(())
    /// ```
    pub fn named(mesh: &Mesh, name: &str, place: impl Fn() -> String) -> Result<Self> {
        if let Some(axis) = mesh.axis(name) {
            return Ok(Self { axis, before: 1, size: mesh.sizes()[axis] });
        }
        let found = parse(name).and_then(|(base, before, size)| Some((mesh.axis(base)?, before, size)));
        let Some((axis, before, size)) = found else {
            return Err(Error::UnknownAxis { place: place(), name: name.to_owned(), axes: mesh.names().to_vec() });
        };
        let whole = mesh.sizes()[axis];
        if before.checked_mul(size).is_none_or(|up_to| whole % up_to != 0) {
            let axis = mesh.names()[axis].clone();
            return Err(Error::SubAxisSize { place: place(), name: name.to_owned(), axis, size: whole });
        }
        Ok(Self { axis, before, size })
    }

    /// The name of the sub-axis in the mesh: that of the axis, or the text of a part of one.
    #[must_use]
    pub fn name(self, mesh: &Mesh) -> String {
        let name = &mesh.names()[self.axis];
        if self.size == mesh.sizes()[self.axis] { name.clone() } else { text(name, self.before, self.size) }
    }

    /// One past its last factor, as a product.
    fn up_to(self) -> i64 {
        self.before * self.size
    }

    /// True if both hold a factor of one axis.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.axis == other.axis
            && self.size > 1
            && other.size > 1
            && self.before < other.up_to()
            && other.before < self.up_to()
    }
}

/// The text of a sub-axis.
#[must_use]
pub fn text(axis: &str, before: i64, size: i64) -> String {
    format!("{axis}:({before}){size}")
}

/// Axis, major factor and size of a sub-axis's text; none if it is not one. There is one spelling of each number.
fn parse(text: &str) -> Option<(&str, i64, i64)> {
    let (axis, numbers) = text.rsplit_once(":(")?;
    let (before, size) = numbers.split_once(')')?;
    Some((axis, number(before)?, number(size)?)).filter(|_| !axis.is_empty())
}

fn number(digits: &str) -> Option<i64> {
    let canonical = digits.starts_with(|c| matches!(c, '1'..='9')) && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| canonical)
}

/// A mesh factored so that each of some sub-axes is a run of its axes.
#[derive(Debug)]
pub(crate) struct Refined {
    pub(crate) mesh: Arc<Mesh>,
    /// For each axis of the given mesh, its first factor among those of the refined one; one more for the end.
    begins: Vec<usize>,
    /// For each refined axis, the product of the factors of its axis before it.
    before: Vec<i64>,
}

impl Refined {
    /// The mesh itself if all of `used` are whole axes, else its coarsest refinement in which they are runs of axes.
    ///
    /// # Errors
    /// [`Error::SubAxesClash`] if two of an axis have no common refinement.
    pub(crate) fn new(mesh: Arc<Mesh>, used: impl Iterator<Item = SubAxis> + Clone) -> Result<Self> {
        let axes = mesh.sizes().len();
        let whole = |sub: &SubAxis| sub.size == 1 || (sub.before == 1 && sub.size == mesh.sizes()[sub.axis]);
        if used.clone().all(|sub| whole(&sub)) {
            return Ok(Self { begins: (0..=axes).collect(), before: vec![1; axes], mesh });
        }
        let mut breaks: Vec<Vec<i64>> = vec![Vec::new(); axes];
        for sub in used.filter(|sub| sub.size > 1) {
            breaks[sub.axis].extend([sub.before, sub.up_to()]);
        }
        let (mut names, mut sizes) = (Vec::new(), Vec::new());
        let (mut begins, mut before) = (vec![0], Vec::new());
        for (axis, mut breaks) in breaks.into_iter().enumerate() {
            let (name, size) = (&mesh.names()[axis], mesh.sizes()[axis]);
            breaks.extend([1, size]);
            breaks.sort_unstable();
            breaks.dedup();
            if breaks.len() <= 2 {
                names.push(name.clone());
                sizes.push(size);
                before.push(1);
            } else {
                for pair in breaks.windows(2) {
                    let (from, to) = (pair[0], pair[1]);
                    if to % from != 0 {
                        return Err(Error::SubAxesClash { axis: name.clone(), first: from, second: to });
                    }
                    names.push(text(name, from, to / from));
                    sizes.push(to / from);
                    before.push(from);
                }
            }
            begins.push(names.len());
        }
        Ok(Self { mesh: Arc::new(Mesh::refined(names, sizes, mesh.size())), begins, before })
    }

    /// The refined axes that `sub` consists of, major first; none if it is of size 1 and not a whole axis.
    pub(crate) fn axes_of(&self, sub: SubAxis) -> std::ops::Range<usize> {
        let (from, to) = (self.begins[sub.axis], self.begins[sub.axis + 1]);
        if to - from == 1 {
            // A factor of size 1 of an axis that is not factored is not that axis, unless the axis is of size 1 as well.
            return if self.mesh.sizes()[from] == sub.size { from..to } else { from..from };
        }
        let held = |axis: &usize| sub.before <= self.before[*axis] && self.before[*axis] < sub.up_to();
        let first = (from..to).find(held).unwrap_or(from);
        let count = (from..to).filter(held).count();
        first..first + count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use proptest::prelude::*;

    fn mesh() -> Arc<Mesh> {
        Arc::new(Mesh::new(&["dp", "tp"], &[2, 24]).unwrap())
    }

    #[test]
    fn an_axis_is_factored_where_its_sub_axes_begin_and_end() {
        let layout = Layout::new(mesh(), &[&["tp:(12)2"][..], &["tp:(1)4", "dp"]], &[]).unwrap();
        assert_eq!(layout.mesh().names(), ["dp", "tp:(1)4", "tp:(4)3", "tp:(12)2"]);
        assert_eq!(layout.mesh().sizes(), [2, 4, 3, 2]);
        assert_eq!(layout.num_shards(), [2, 8]);
        assert_eq!(layout.replicated_axes(), [2]);
        // A sub-axis may be a run of what others make of the axis... here of none: the axis stays whole.
        let whole = Layout::new(mesh(), &[&["tp:(1)24"][..]], &[]).unwrap();
        assert_eq!((whole.mesh().names(), whole.num_shards()), (&["dp".to_owned(), "tp".to_owned()][..], &[24][..]));
    }

    #[test]
    fn a_sub_axis_of_size_one_cuts_nothing() {
        let layout = Layout::new(mesh(), &[&["tp:(6)1"][..], &["tp"]], &[]).unwrap();
        assert_eq!(layout.num_shards(), [1, 24]);
        assert_eq!(layout.mesh().names(), ["dp", "tp"]);
    }

    #[test]
    fn what_cannot_stand_together_is_refused() {
        let refused = |specs: &[&[&str]]| Layout::new(mesh(), specs, &[]).unwrap_err().to_string();
        assert_eq!(
            refused(&[&["tp"], &["tp:(2)3"]]),
            "axes[1] uses axis \"tp:(2)3\", which overlaps \"tp\" in axes[0]; a part of a mesh axis cuts at most one dim, once"
        );
        assert_eq!(
            refused(&[&["tp:(1)4"], &["tp:(2)3"]]),
            "axes[1] uses axis \"tp:(2)3\", which overlaps \"tp:(1)4\" in axes[0]; a part of a mesh axis cuts at most one dim, once"
        );
        assert_eq!(
            refused(&[&["tp:(1)2"], &["tp:(3)2"]]),
            "sub-axes of \"tp\" cannot be combined: they have boundaries at 2 and 3, and neither divides the other"
        );
        assert_eq!(refused(&[&["tp:(1)5"]]), "axes[0] names \"tp:(1)5\", which does not divide axis \"tp\" of size 24");
        for unknown in ["tp:(0)2", "tp:(1)0", "tp:(01)2", "tp:(1)+2", "tp:(1)", "tp:1", ":(1)2", "pp:(1)2", "tp:(1)2 "]
        {
            assert!(refused(&[&[unknown]]).contains("does not have"), "{unknown}");
        }
        let large = format!("tp:({})4", i64::MAX);
        assert!(refused(&[&[&large]]).contains("does not divide"));
    }

    proptest! {
        #[test]
        fn the_coordinate_along_a_sub_axis_is_that_of_the_rule(m in 1..5_i64, k in 1..5_i64, r in 1..5_i64, outer in 1..4_i64) {
            let n = m * k * r;
            let mesh = Arc::new(Mesh::new(&["a", "b"], &[outer, n]).unwrap());
            let name = text("b", m, k);
            let layout = Arc::new(Layout::new(mesh, &[[name.as_str()]], &[]).unwrap());
            let p = crate::partition::Partition::new(layout, &[k], crate::uneven::Uneven::Even).unwrap();
            for device in 0..outer * n {
                prop_assert_eq!(p.layout().shard_index(device).unwrap(), [device % n / r % k]);
                prop_assert_eq!(p.layout().replica_id(device).unwrap(), (0..device).filter(|d| d % n / r % k == device % n / r % k).count() as i64);
            }
        }
    }
}
