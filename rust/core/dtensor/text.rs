//! The text form, read and written.
//!
//! - A mesh with axes: `name|x=2,y=2|global ids|local ids|local devices`, then `|global devices` if there are any, then
//!   `|use_xla_spmd` if that is set. Lists are joined by commas.
//! - A mesh of one device: its name. The mesh of none: `empty_mesh`.
//! - In TensorFlow's tests, `name|x=2|*TYPE`: a mesh of which the ids and the devices are to be made up.
//! - A layout: `sharding_specs:x,unsharded, mesh:` or `parted:x, mesh:` and the mesh, with a comma after every spec;
//!   `maximal:true, mesh:` and the device; `empty_layout`.
//!
//! Numbers are decimal, as [`super::device::number`] has them. Reading is one pass over the text; what it keeps is not
//! larger than a small multiple of the text, except the made-up devices, of which there are at most
//! [`MAX_GENERATED`].

use std::sync::Arc;

use super::{
    DeviceList, DeviceSpec, Error, Ids, Layout, LayoutKind, MAX_AXES, MAX_RANK, Mesh, MeshParts, Result,
    decimal::joined_numbers, device::number, tiled_mesh::TiledMesh,
};
use crate::radix;

const EMPTY_MESH: &str = "empty_mesh";
const EMPTY_LAYOUT: &str = "empty_layout";
const USE_XLA_SPMD: &str = "use_xla_spmd";
const STATIC: &str = "sharding_specs:";
const PARTED: &str = "parted:";
const SINGLE_DEVICE: &str = "maximal:";
const BEFORE_MESH: &str = " mesh:";

/// The most devices that are made up for a text of three fields.
const MAX_GENERATED: i64 = 1 << 20;

impl Mesh {
    /// The text form.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            Self::Empty => EMPTY_MESH.to_owned(),
            Self::SingleDevice(device) => device.clone(),
            Self::Tiled(tiled) => self.tiled_text(tiled),
        }
    }

    fn tiled_text(&self, tiled: &TiledMesh) -> String {
        let local_devices = self.local_devices().map_or("", DeviceList::joined);
        let global_devices = tiled.global_devices().joined();
        let mut text = String::with_capacity(local_devices.len() + global_devices.len() + 64);
        text.push_str(self.name());
        let mut separator = '|';
        for (name, size) in self.dim_names().iter().zip(self.shape()) {
            text.push_str(&format!("{separator}{name}={size}"));
            separator = ',';
        }
        let ids = joined_numbers(self.global_ids());
        text.push_str(&ids);
        // Where there is one client, all devices are its own.
        if self.global_ids().eq(self.local_ids().iter().copied()) {
            text.push_str(&ids);
        } else {
            text.push_str(&joined_numbers(self.local_ids().iter().copied()));
        }
        text.push('|');
        text.push_str(local_devices);
        if !global_devices.is_empty() {
            text.push('|');
            text.push_str(global_devices);
        }
        if self.use_xla_spmd() {
            text.push('|');
            text.push_str(USE_XLA_SPMD);
        }
        text
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// [`Error::Text`] with the byte offset if the text does not follow its format; if it does not describe a mesh, the
    /// errors of [`Mesh::new`].
    pub fn from_text(text: &str) -> Result<Self> {
        let whole = Field { what: "mesh text", text, at: 0 };
        whole.no_nul()?;
        read_mesh(whole)
    }
}

impl Layout {
    /// The text form.
    #[must_use]
    pub fn to_text(&self) -> String {
        let head = match self.kind() {
            LayoutKind::Empty => return EMPTY_LAYOUT.to_owned(),
            LayoutKind::SingleDevice => "maximal:true,",
            LayoutKind::Static => STATIC,
            LayoutKind::Parted => PARTED,
        };
        let mut text = head.to_owned();
        for spec in self.spec_texts() {
            text.push_str(spec);
            text.push(',');
        }
        text.push_str(BEFORE_MESH);
        text.push_str(&self.mesh().to_text());
        text
    }

    /// Reads the text form.
    ///
    /// # Errors
    /// [`Error::Text`] with the byte offset if the text does not follow its format; if it does not describe a mesh or a
    /// layout, the errors of [`Mesh::new`] and [`Layout::new`].
    pub fn from_text(text: &str) -> Result<Self> {
        let whole = Field { what: "layout text", text, at: 0 };
        whole.no_nul()?;
        if text == EMPTY_LAYOUT {
            return Ok(Self::empty());
        }
        // No name holds a colon, so the first of these ends the specs, whatever the names hold.
        let Some((head, mesh)) = text.split_once(BEFORE_MESH) else {
            return Err(whole.error(text.len(), "no ` mesh:`"));
        };
        let mesh_field = Field { text: mesh, at: head.len() + BEFORE_MESH.len(), ..whole };
        let (kind, prefix) =
            [(LayoutKind::Static, STATIC), (LayoutKind::Parted, PARTED), (LayoutKind::SingleDevice, SINGLE_DEVICE)]
                .into_iter()
                .find(|(_, prefix)| head.starts_with(prefix))
                .ok_or_else(|| whole.error(0, "neither `sharding_specs:`, `parted:` nor `maximal:`"))?;
        let specs = Field { text: &head[prefix.len()..], at: prefix.len(), ..whole };
        let specs = if kind == LayoutKind::SingleDevice {
            if specs.text != "true," {
                return Err(specs.error(0, "`maximal:` is not followed by `true,`"));
            }
            Vec::new()
        } else {
            read_specs(specs)?
        };
        Self::new(kind, &specs, Arc::new(read_mesh(mesh_field)?))
    }
}

/// A part of a text that is being read, and where it begins.
#[derive(Clone, Copy)]
struct Field<'a> {
    what: &'static str,
    text: &'a str,
    at: usize,
}

impl<'a> Field<'a> {
    /// An error `offset` bytes into the field.
    fn error(&self, offset: usize, problem: impl Into<String>) -> Error {
        Error::Text { what: self.what, at: self.at + offset, problem: problem.into() }
    }

    fn no_nul(&self) -> Result<()> {
        match self.text.find('\0') {
            Some(offset) => Err(self.error(offset, "a NUL character")),
            None => Ok(()),
        }
    }

    /// The parts between separators; an empty field has one, which is empty.
    fn split(self, separator: char) -> impl Iterator<Item = Self> {
        let mut at = self.at;
        self.text.split(separator).map(move |text| {
            let part = Self { text, at, ..self };
            at += text.len() + separator.len_utf8();
            part
        })
    }

    /// The entries of a list, of which an empty field has none.
    fn entries(self) -> impl Iterator<Item = Self> + use<'a> {
        let some = !self.text.is_empty();
        self.split(',').filter(move |_| some)
    }

    /// The number of entries of the list.
    fn count(&self) -> usize {
        if self.text.is_empty() { 0 } else { self.text.bytes().filter(|&b| b == b',').count() + 1 }
    }

    fn number(&self) -> Result<i64> {
        number(self.text).map_err(|problem| self.error(0, format!("{:?} is {problem}", Excerpt(self.text))))
    }

    /// Reads a list of numbers. They are short, so that stepping to the next comma is faster than searching for it.
    fn numbers(self, mut keep: impl FnMut(i64)) -> Result<()> {
        let mut at = 0;
        while at <= self.text.len() && !self.text.is_empty() {
            let rest = &self.text[at..];
            let entry = &rest[..rest.bytes().take_while(|&b| b != b',').count()];
            keep(Self { text: entry, at: self.at + at, ..self }.number()?);
            at += entry.len() + 1;
        }
        Ok(())
    }

    /// The devices of a list; whether they are device names is for the mesh to find.
    fn devices(self) -> DeviceList {
        DeviceList::from_joined(self.text)
    }

    /// The first entry of a list of devices that is not a device name, as an error of the text.
    fn check_devices(self) -> Result<()> {
        self.entries().try_for_each(|device| device.check_device())
    }

    fn check_device(&self) -> Result<()> {
        if self.text.is_empty() {
            return Err(self.error(0, "a device without a name"));
        }
        DeviceSpec::parse(self.text).map(|_| ()).map_err(|e| {
            let problem = format!("{:?} is not a device name: {}", Excerpt(self.text), e.problem);
            self.error(e.at, problem)
        })
    }
}

/// The beginning of a text that may be very long, for messages.
struct Excerpt<'a>(&'a str);

impl std::fmt::Debug for Excerpt<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.char_indices().nth(60) {
            Some((end, _)) => write!(f, "{:?}…", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
        }
    }
}

fn read_mesh(whole: Field<'_>) -> Result<Mesh> {
    if whole.text == EMPTY_MESH {
        return Ok(Mesh::Empty);
    }
    // One more than there can be is enough to know.
    let fields: Vec<Field<'_>> = whole.split('|').take(8).collect();
    let parts = match fields[..] {
        [device] => {
            device.check_device()?;
            return Mesh::from_device(device.text);
        }
        [name, axes, made_up] => return generate(name, axes, made_up),
        [name, axes, ids, local_ids, devices] => read_parts([name, axes, ids, local_ids, devices])?,
        [name, axes, ids, local_ids, devices, last] => {
            let mut parts = read_parts([name, axes, ids, local_ids, devices])?;
            if last.text == USE_XLA_SPMD {
                parts.use_xla_spmd = true;
            } else {
                parts.global_devices = global_devices(last)?;
            }
            parts
        }
        [name, axes, ids, local_ids, devices, global, last] => {
            let mut parts = read_parts([name, axes, ids, local_ids, devices])?;
            parts.global_devices = global_devices(global)?;
            if last.text != USE_XLA_SPMD {
                return Err(last.error(0, format!("the seventh field is not `{USE_XLA_SPMD}`")));
            }
            parts.use_xla_spmd = true;
            parts
        }
        _ => {
            let count = if fields.len() == 8 { "more than 7".to_owned() } else { fields.len().to_string() };
            return Err(whole.error(0, format!("a mesh has 1, 3, 5, 6 or 7 fields between `|`, not {count}")));
        }
    };
    // Device names are read once, by the mesh. Only when it is refused are they looked at here, since a text that is wrong
    // goes before a mesh that is.
    Mesh::new(parts).or_else(|error| {
        fields[4..].iter().filter(|field| field.text != USE_XLA_SPMD).try_for_each(|field| field.check_devices())?;
        Err(error)
    })
}

fn read_parts([name, axes, ids, local_ids, devices]: [Field<'_>; 5]) -> Result<MeshParts> {
    let (dim_names, shape) = read_axes(axes)?;
    let mut global_ids = Ids::default();
    ids.numbers(|id| global_ids.push(id))?;
    let mut local = Vec::with_capacity(local_ids.count());
    local_ids.numbers(|id| local.push(id))?;
    Ok(MeshParts {
        name: name.text.to_owned(),
        dim_names,
        shape,
        global_ids,
        local_ids: local,
        local_devices: devices.devices(),
        ..MeshParts::default()
    })
}

fn global_devices(field: Field<'_>) -> Result<DeviceList> {
    if field.text.is_empty() {
        return Err(field.error(0, "an empty field of global devices; a mesh without global devices has no such field"));
    }
    Ok(field.devices())
}

fn read_axes(field: Field<'_>) -> Result<(Vec<String>, Vec<i64>)> {
    let count = field.count();
    if count > MAX_AXES {
        return Err(field.error(0, format!("{count} axes; a mesh has at most {MAX_AXES}")));
    }
    let mut names = Vec::with_capacity(count);
    let mut sizes = Vec::with_capacity(count);
    for axis in field.entries() {
        let Some((name, size)) = axis.text.split_once('=') else {
            return Err(axis.error(0, format!("{:?} is not `name=size`", Excerpt(axis.text))));
        };
        sizes.push(Field { text: size, at: axis.at + name.len() + 1, ..axis }.number()?);
        names.push(name.to_owned());
    }
    Ok((names, sizes))
}

/// The mesh that TensorFlow's tests write as `name|x=2,y=2|*TYPE`.
fn generate(name: Field<'_>, axes: Field<'_>, made_up: Field<'_>) -> Result<Mesh> {
    let (dim_names, shape) = read_axes(axes)?;
    let Some(device_type) = made_up.text.strip_prefix('*') else {
        return Err(made_up.error(0, "the third of three fields is not `*` and a device type"));
    };
    if let Err((_, problem)) = DeviceSpec::new(None, None, None, Some(device_type), None) {
        return Err(made_up.error(1, format!("{:?} is not a device type: {problem}", Excerpt(device_type))));
    }
    let size = radix::product("shape", &shape)?;
    if size > MAX_GENERATED {
        return Err(axes.error(0, format!("{size} devices to be made up; the limit is {MAX_GENERATED}")));
    }
    let mut local_devices = DeviceList::with_capacity(usize::try_from(size).unwrap_or(0));
    for id in 0..size {
        local_devices.push(&format!("/job:localhost/task:0/device:{device_type}:{id}"));
    }
    Mesh::new(MeshParts {
        name: name.text.to_owned(),
        dim_names,
        shape,
        global_ids: Ids::consecutive(0, local_devices.len()),
        local_ids: (0..size).collect(),
        local_devices,
        ..MeshParts::default()
    })
}

fn read_specs(field: Field<'_>) -> Result<Vec<&str>> {
    if field.text.is_empty() {
        return Ok(Vec::new());
    }
    let Some(text) = field.text.strip_suffix(',') else {
        return Err(field.error(field.text.len(), "no comma after the last spec"));
    };
    let count = text.bytes().filter(|&b| b == b',').count() + 1;
    if count > MAX_RANK {
        return Err(field.error(0, format!("{count} specs; a layout has at most {MAX_RANK}")));
    }
    Ok(text.split(',').collect())
}
