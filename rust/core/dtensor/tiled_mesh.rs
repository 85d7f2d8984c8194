//! A mesh with axes, and the checks of its parts: names, ids and devices fit together.

use std::{collections::HashMap, sync::Arc};

use super::{DeviceList, DeviceProblem, DeviceSpec, Error, MAX_AXES, Result};
use crate::{error::Error as CoreError, mesh::Mesh as Axes};

/// The names that mean something in a layout, and so cannot name an axis.
const RESERVED: [&str; 3] = [super::UNSHARDED, super::ANY, super::MATCH];

/// The characters of the text form that no name can hold.
const SEPARATORS: [char; 5] = ['|', ',', '=', ':', '\0'];

/// The parts of a mesh with axes; [`TiledMesh::new`] checks that they fit together.
#[derive(Debug, Clone, Default)]
pub struct MeshParts {
    /// The mesh's own name, often empty.
    pub name: String,
    /// The axis names.
    pub dim_names: Vec<String>,
    /// The axis sizes.
    pub shape: Vec<i64>,
    /// The ids of all devices in row-major order: consecutive, from any number on.
    pub global_ids: Ids,
    /// The ids of the devices that this client holds.
    pub local_ids: Vec<i64>,
    /// The names of those devices.
    pub local_devices: DeviceList,
    /// The names of all devices, or none.
    pub global_devices: DeviceList,
    /// True if XLA partitions programs, rather than DTensor.
    pub use_xla_spmd: bool,
}

/// Ids that go up by one, kept as the first and their number, so that a million of them cost nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Ids {
    first: i64,
    count: usize,
    /// The first gap in the ids: the position and the id there.
    gap: Option<(usize, i64)>,
}

impl Ids {
    /// The `count` ids from `first` on.
    #[must_use]
    pub fn consecutive(first: i64, count: usize) -> Self {
        Self { first, count, gap: None }
    }

    /// Takes the next id.
    #[inline]
    pub fn push(&mut self, id: i64) {
        if self.count == 0 {
            self.first = id;
        } else if self.gap.is_none()
            && i64::try_from(self.count).ok().and_then(|n| self.first.checked_add(n)) != Some(id)
        {
            self.gap = Some((self.count, id));
        }
        self.count += 1;
    }

    /// The first id, if there are `size` without a gap.
    fn check(self, size: i64) -> Result<i64> {
        if i64::try_from(self.count) != Ok(size) {
            return Err(Error::GlobalIdCount { given: self.count, size });
        }
        if let Some((position, given)) = self.gap {
            let expected = self.first.saturating_add(position as i64);
            return Err(Error::GlobalIdGap { position, given, expected });
        }
        if self.first < 0 {
            return Err(Error::NegativeId { first: self.first });
        }
        if self.first.checked_add(size).is_none() {
            return Err(CoreError::Overflow { what: format!("global_device_ids: {} + {size}", self.first) }.into());
        }
        Ok(self.first)
    }
}

impl Extend<i64> for Ids {
    fn extend<I: IntoIterator<Item = i64>>(&mut self, ids: I) {
        ids.into_iter().for_each(|id| self.push(id));
    }
}

/// A mesh with axes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TiledMesh {
    pub(super) name: String,
    pub(super) axes: Arc<Axes>,
    pub(super) first_id: i64,
    pub(super) local_ids: Vec<i64>,
    pub(super) local_devices: DeviceList,
    pub(super) global_devices: DeviceList,
    pub(super) use_xla_spmd: bool,
}

impl TiledMesh {
    /// The mesh of these parts.
    ///
    /// # Errors
    /// The errors of [`Axes::new`]; more than [`MAX_AXES`] axes; a name that is reserved or that the text form cannot
    /// hold; ids with gaps, below zero, or local without being global; devices without names or types,
    /// of several types, or given twice. One host CPU may stand at all positions, as it does for a mesh of accelerators.
    pub fn new(parts: MeshParts) -> Result<Self> {
        check_name("mesh_name", &parts.name)?;
        if parts.dim_names.len() > MAX_AXES {
            return Err(Error::TooManyAxes { given: parts.dim_names.len(), limit: MAX_AXES });
        }
        if parts.dim_names.len() != parts.shape.len() {
            return Err(Error::DimCount { names: parts.dim_names.len(), dims: parts.shape.len() });
        }
        for (axis, name) in parts.dim_names.iter().enumerate() {
            check_name(&format!("dim_names[{axis}]"), name)?;
            if RESERVED.contains(&name.as_str()) {
                return Err(Error::ReservedName { axis, name: name.clone() });
            }
        }
        let axes = Axes::new(&parts.dim_names, &parts.shape)?;
        let first_id = parts.global_ids.check(axes.size())?;
        check_local_ids(&parts.local_ids, first_id, axes.size(), parts.local_devices.len())?;
        if !parts.global_devices.is_empty() && i64::try_from(parts.global_devices.len()) != Ok(axes.size()) {
            return Err(Error::GlobalDeviceCount { given: parts.global_devices.len(), size: axes.size() });
        }
        let mut device_type = None;
        for (list, devices) in [("local_devices", &parts.local_devices), ("global_devices", &parts.global_devices)] {
            check_devices(list, devices, &mut device_type)?;
        }
        let device_type = device_type.ok_or(Error::NoDevices)?;
        if parts.use_xla_spmd && device_type != "TPU" {
            return Err(Error::XlaSpmd { device_type: device_type.to_owned() });
        }
        Ok(Self {
            name: parts.name,
            axes: Arc::new(axes),
            first_id,
            local_ids: parts.local_ids,
            local_devices: parts.local_devices,
            global_devices: parts.global_devices,
            use_xla_spmd: parts.use_xla_spmd,
        })
    }

    /// The axes: names, sizes, strides.
    #[must_use]
    pub fn axes(&self) -> &Arc<Axes> {
        &self.axes
    }

    /// The ids of all devices, which go up by one.
    #[must_use]
    pub fn global_ids(&self) -> std::ops::Range<i64> {
        self.first_id..self.first_id + self.axes.size()
    }

    /// The names of all devices, if they were given.
    #[must_use]
    pub fn global_devices(&self) -> &DeviceList {
        &self.global_devices
    }
}

fn check_name(what: &str, name: &str) -> Result<()> {
    match name.chars().find(|c| SEPARATORS.contains(c)) {
        Some(found) => Err(Error::NameCharacter { what: what.to_owned(), name: name.to_owned(), found }),
        None => Ok(()),
    }
}

fn check_local_ids(ids: &[i64], first: i64, size: i64, devices: usize) -> Result<()> {
    if ids.len() != devices {
        return Err(Error::LocalCount { ids: ids.len(), devices });
    }
    let last = first + (size - 1);
    if let Some((position, &id)) = ids.iter().enumerate().find(|&(_, &id)| id < first || id > last) {
        return Err(Error::LocalIdOutside { position, id, first, last });
    }
    // Increasing ids, the usual case, have no duplicates.
    if ids.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut seen = HashMap::with_capacity(ids.len());
    for (second, &id) in ids.iter().enumerate() {
        if let Some(first) = seen.insert(id, second) {
            return Err(Error::LocalIdRepeated { id, first, second });
        }
    }
    Ok(())
}

/// Checks that all `devices` are of one type, and no two the same; `device_type` is that of earlier lists, if any.
fn check_devices<'a>(list: &'static str, devices: &'a DeviceList, device_type: &mut Option<&'a str>) -> Result<()> {
    let what = |position: usize| format!("{list}[{position}]");
    let (mut all_equal, mut increasing) = (true, true);
    let mut before = None;
    for (position, (device, spec)) in devices.iter().zip(devices.specs()).enumerate() {
        let spec = spec.map_err(|problem| no_device(what(position), device, problem))?;
        let Some(this_type) = spec.device_type else {
            return Err(Error::NoDeviceType { what: what(position), text: device.to_owned() });
        };
        let first = *device_type.get_or_insert(this_type);
        if first != this_type {
            let (what, text, first) = (what(position), device.to_owned(), first.to_owned());
            return Err(Error::MixedTypes { what, text, first });
        }
        all_equal = all_equal && before.is_none_or(|before| before == spec);
        increasing = increasing && before.is_none_or(|before| before < spec);
        before = Some(spec);
    }
    // Names in increasing order, the usual case, differ; and one host CPU may stand everywhere.
    if increasing || (all_equal && *device_type == Some("CPU")) {
        return Ok(());
    }
    match devices.duplicate() {
        Some((first, second)) => {
            let text = devices.get(second).unwrap_or_default().to_owned();
            Err(Error::DuplicateDevice { list, first, second, text })
        }
        None => Ok(()),
    }
}

/// Checks that `device` is a device name that tells its type.
pub(super) fn check_device(what: &str, device: &str) -> Result<()> {
    let spec = DeviceSpec::parse(device).map_err(|problem| no_device(what.to_owned(), device, problem))?;
    if spec.device_type.is_none() {
        return Err(Error::NoDeviceType { what: what.to_owned(), text: device.to_owned() });
    }
    Ok(())
}

fn no_device(what: String, device: &str, problem: DeviceProblem) -> Error {
    Error::Device { what, text: device.to_owned(), problem: problem.to_string() }
}
