//! What changes in a folder, told as it happens. Folders are looked at with the rights of the user who asks, so nobody
//! learns of names that they could not list.
//!
//! Bounded: so many watchers, so many folders each, and the kernel's own queue; what goes beyond is not kept but said
//! (`MISSED`), so that a watcher that is too slow knows that it must look again. It must never follow a symbolic link
//! below the folder it was asked for.

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags as Flags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use space_proto::guest::{FileChange, FileEvent, WatchFilesRequest};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tonic::Status;

use crate::files::{as_user, path, status};
use crate::users::User;

pub const WATCHERS_MAX: usize = 16;
/// Folders of one watcher.
const FOLDERS_MAX: usize = 4096;
/// Of one look.
const EVENTS_MAX: usize = 8192;
static WATCHERS: Semaphore = Semaphore::const_new(WATCHERS_MAX);

type Sender = mpsc::Sender<Result<FileEvent, Status>>;

/// One watcher: a queue of the kernel and the folders it is for.
struct Watch {
    queue: Inotify,
    folders: HashMap<WatchDescriptor, PathBuf>,
    root: WatchDescriptor,
    recursive: bool,
}

fn flags() -> Flags {
    Flags::IN_CREATE
        | Flags::IN_MODIFY
        | Flags::IN_CLOSE_WRITE
        | Flags::IN_ATTRIB
        | Flags::IN_DELETE
        | Flags::IN_DELETE_SELF
        | Flags::IN_MOVED_FROM
        | Flags::IN_MOVED_TO
        | Flags::IN_MOVE_SELF
}

fn event(change: FileChange, path: &Path) -> FileEvent {
    FileEvent { change: change.into(), path: path.to_string_lossy().into_owned(), cookie: 0, directory: false }
}

/// Begins to watch and returns; the events go to `to` until its receiver is dropped or the folder is gone.
pub async fn start(request: WatchFilesRequest, user: User, to: Sender) -> Result<(), Status> {
    let busy = || Status::resource_exhausted(format!("{WATCHERS_MAX} watchers are at work in this sandbox already"));
    let permit = WATCHERS.try_acquire().map_err(|_| busy())?;
    let begun = as_user(user.clone(), move |user| {
        let root = path(&request.path, user)?;
        let failed = |errno: Errno| status("watch", &root, &errno.into());
        let queue = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).map_err(failed)?;
        let descriptor = queue.add_watch(&root, flags()).map_err(failed)?;
        let folders = HashMap::from([(descriptor, root.clone())]);
        let mut watch = Watch { queue, folders, root: descriptor, recursive: request.recursive };
        let mut events = Events::default();
        if watch.recursive {
            watch.add_below(&root, &mut events, false);
        }
        events.push(event(FileChange::Ready, &root));
        Ok((watch, events))
    });
    let (watch, events) = begun.await?;
    tokio::spawn(async move {
        let _permit: SemaphorePermit<'static> = permit;
        let ended = tokio::select! {
            ended = run(watch, events, user, &to) => ended,
            () = to.closed() => return,
        };
        if let Err(status) = ended {
            let _ = to.send(Err(status)).await;
        }
    });
    Ok(())
}

async fn run(mut watch: Watch, first: Events, user: User, to: &Sender) -> Result<(), Status> {
    let failed = |error: std::io::Error| Status::internal(format!("cannot watch: {error}"));
    let queue = watch.queue.as_fd().try_clone_to_owned().map_err(failed)?;
    let queue = crate::sys::async_fd(queue).map_err(failed)?;
    let (mut events, mut over) = (first, false);
    loop {
        for event in events.0 {
            if to.send(Ok(event)).await.is_err() {
                return Ok(());
            }
        }
        if over {
            return Ok(());
        }
        let mut ready = queue.readable().await.map_err(failed)?;
        // A look into a folder may take as long as the guest's file system likes: never on the runtime's own thread.
        let read = as_user(user.clone(), move |_| {
            let raw = match watch.queue.read_events() {
                Ok(raw) => raw,
                Err(Errno::EAGAIN) => return Ok((watch, Events::default(), false, true)),
                Err(errno) => return Err(failed(errno.into())),
            };
            let (events, over) = watch.tell(raw);
            Ok((watch, events, over, false))
        });
        let empty;
        (watch, events, over, empty) = read.await?;
        if empty {
            ready.clear_ready();
        }
    }
}

/// What one look found, in order. Not longer than a watcher can be told at once.
#[derive(Default)]
struct Events(Vec<FileEvent>);

impl Events {
    fn push(&mut self, event: FileEvent) {
        let mut event = event;
        if self.0.len() >= EVENTS_MAX {
            event.change = FileChange::Missed.into();
        }
        // Many writes are one change, and once told that something was missed there is nothing more to say of it.
        let last = self.0.last();
        let told = match event.change() {
            FileChange::Modified => last == Some(&event),
            FileChange::Missed => last.is_some_and(|last| last.change() == FileChange::Missed),
            _ => false,
        };
        if !told {
            self.0.push(event);
        }
    }
}

impl Watch {
    /// Watches every folder below `folder`. What is in there already is told only when it came after the watch began.
    fn add_below(&mut self, folder: &Path, events: &mut Events, tell: bool) {
        let mut waiting = vec![folder.to_owned()];
        while let Some(folder) = waiting.pop() {
            // Gone, or not for this user: then there is nothing to tell of it.
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let (path, is_dir) = (entry.path(), entry.file_type().is_ok_and(|kind| kind.is_dir()));
                if tell {
                    events.push(FileEvent { directory: is_dir, ..event(FileChange::Created, &path) });
                }
                if is_dir && self.add(&path, events) {
                    waiting.push(path);
                }
            }
        }
    }

    /// False when it is not watched: it is gone, not for this user, or one too many.
    fn add(&mut self, path: &Path, events: &mut Events) -> bool {
        if self.folders.len() >= FOLDERS_MAX {
            events.push(event(FileChange::Missed, path));
            return false;
        }
        match self.queue.add_watch(path, flags() | Flags::IN_ONLYDIR | Flags::IN_DONT_FOLLOW) {
            Ok(descriptor) => {
                self.folders.insert(descriptor, path.to_owned());
                true
            }
            Err(_) => false,
        }
    }

    /// The events of one reading, and whether the watched folder is gone.
    fn tell(&mut self, raw: Vec<InotifyEvent>) -> (Events, bool) {
        let (mut events, mut new, mut over) = (Events::default(), Vec::new(), false);
        for raw in raw {
            if raw.mask.contains(Flags::IN_Q_OVERFLOW) {
                let root = self.folders.get(&self.root).cloned().unwrap_or_default();
                events.push(event(FileChange::Missed, &root));
                continue;
            }
            let Some(folder) = self.folders.get(&raw.wd).cloned() else { continue };
            if raw.mask.contains(Flags::IN_IGNORED) {
                self.folders.remove(&raw.wd);
                over |= raw.wd == self.root;
                continue;
            }
            let own = raw.name.is_none();
            let path = raw.name.as_ref().map_or(folder.clone(), |name| folder.join(name));
            let Some(change) = change_of(raw.mask) else { continue };
            // Of a folder below, its parent tells the same.
            if own && raw.wd != self.root {
                continue;
            }
            if own && raw.mask.intersects(Flags::IN_MOVE_SELF) {
                over = true;
            }
            let directory = raw.mask.contains(Flags::IN_ISDIR);
            events.push(FileEvent { cookie: raw.cookie, directory, ..event(change, &path) });
            if self.recursive && directory && matches!(change, FileChange::Created | FileChange::MovedHere) {
                new.push(path);
            }
        }
        for path in new {
            if self.add(&path, &mut events) {
                self.add_below(&path, &mut events, true);
            }
        }
        (events, over)
    }
}

fn change_of(mask: Flags) -> Option<FileChange> {
    let changes = [
        (Flags::IN_CREATE, FileChange::Created),
        (Flags::IN_MOVED_TO, FileChange::MovedHere),
        (Flags::IN_MOVED_FROM | Flags::IN_MOVE_SELF, FileChange::MovedAway),
        (Flags::IN_DELETE | Flags::IN_DELETE_SELF, FileChange::Removed),
        (Flags::IN_MODIFY | Flags::IN_CLOSE_WRITE, FileChange::Modified),
        (Flags::IN_ATTRIB, FileChange::Attributes),
    ];
    changes.into_iter().find(|(flags, _)| mask.intersects(*flags)).map(|(_, change)| change)
}
