/**
 * Shows on the nodes of this pack what they say: the summary after a run, and the reason when
 * ComfyUI refuses a prompt or a node fails. Fills in the names of what they save. Nodes of other
 * packs are left alone. A template of this pack opens with all of its graph in view.
 */

import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"

const OURS = "QwenL40S_"
const BOX = "qwen_l40s"
const MARGIN = 8
/** The height of a text and of a text area in pixels of the graph; a longer one scrolls. */
const MOST_HEIGHT = 176, MOST_TEXT_AREA = 128
/** What the page's bars cover, in pixels of the window. */
const LEFT = 66, TOP = 92, RIGHT = 8, BOTTOM = 8

const STYLE = `
.qwen-l40s-box { box-sizing: border-box; padding: 4px 8px; border-radius: 4px; overflow: hidden;
    display: flex; flex-direction: column; background: var(--comfy-input-bg, #222); color: var(--input-text, #ddd); user-select: text;
    font: 12px/16px sans-serif; white-space: pre-wrap; overflow-wrap: anywhere; cursor: text; }
.qwen-l40s-box.error { color: color-mix(in srgb, #f00 55%, var(--input-text, #ddd)); }
.qwen-l40s-box button, .qwen-l40s-report button { font: 12px/16px sans-serif; padding: 1px 8px;
    color: inherit; background: none; border: 1px solid; border-radius: 4px; cursor: pointer; }
.qwen-l40s-box div { min-height: 0; overflow: auto; }
.qwen-l40s-box button { flex: none; align-self: start; margin-top: 4px; opacity: 0.8; }
.qwen-l40s-report { margin: auto; padding: 12px; max-width: 94vw; max-height: 90vh; overflow: auto;
    background: var(--comfy-menu-bg, #222); color: var(--input-text, #ddd);
    border: 1px solid var(--border-color, #555); border-radius: 8px; }
.qwen-l40s-report pre { margin: 0 0 12px; font: 13px/18px monospace; user-select: text; }
`

/**
 * What a node says.
 * `planned` is its report before the sampler ran, and `did` whether this one is of a run that is over.
 * @typedef {{summary?: string, report?: string, error?: string, planned?: string, did?: boolean, height?: number, grown: number}} Said
 * @type {WeakMap<object, Said>}
 */
const saidBy = new WeakMap()
/** The nodes that show an error. */
const failed = new Set()

/** {English: the page's language}, of locales/zh/main.json; "#" stands for a figure. */
let words = {}
const FIGURE = /\d[\d.]*/g

/** A text in the page's language, or as it is. */
function say(text) {
    const figures = text.match(FIGURE) ?? []
    return words[text] ?? words[text.replace(FIGURE, "#")]?.replace(/#/g, () => figures.shift()) ?? text
}

/** A note in the page's language, line by line and part by part. */
function sayNote(text) {
    return text.split("\n").map((line) => {
        const [, mark, said, end] = line.match(/^(## |- |)(.*?)(\\?)$/)
        return mark + said.split(" · ").map(say).join(" · ") + end
    }).join("\n")
}

/**
 * Gives a template the page's language and its notes the theme's colours. The page itself translates nodes
 * that it makes only, and its brown of a note hides the code and tables of Nodes 2.0.
 */
function dress({ nodes, groups }) {
    for (const group of groups) group.title = say(group.title)
    for (const node of nodes) {
        const [base, rest] = node.title.split(/ \((.*)\)$/)
        const own = node.constructor.title
        if (node.type === "MarkdownNote") {
            node.color = node.bgcolor = undefined
            node.widgets[0].value = sayNote(node.widgets[0].value)
        }
        if (!Object.keys(words).length) continue
        if (node.flags.collapsed || node.type === "MarkdownNote") node.title = say(node.title)
        else if (isOurs(node)) node.title = own
        else node.title = own.split(/ ?[(（]/)[0] + (rest ? ` (${say(rest)})` : "")
    }
}

/** Whether a node belongs to this pack. */
const isOurs = (node) => Boolean(node?.comfyClass?.startsWith(OURS))

/**
 * The node with an id, in the graph or in its subgraphs.
 * @param {string} id "5", or "3:5" for node 5 in the subgraph of node 3; the page has the subgraph first.
 */
function nodeOf(id) {
    let node = null
    let graph = app.graph.rootGraph ?? app.graph
    for (const part of String(id).split(":")) {
        node = graph?.getNodeById(part)
        graph = node?.subgraph ?? graph?.subgraphs?.get(part)
    }
    return isOurs(node) ? node : null
}

/** Shows a text in a dialog, to read and to copy. */
function showReport(title, report) {
    const dialog = document.createElement("dialog")
    dialog.className = "qwen-l40s-report"
    dialog.setAttribute("aria-label", title)
    const text = document.createElement("pre")
    text.textContent = report
    const close = document.createElement("button")
    close.textContent = say("Close")
    close.onclick = () => dialog.close()
    dialog.append(text, close)
    dialog.onclose = () => dialog.remove()
    // Ctrl+C copies the text; the page would copy nodes.
    for (const event of ["keydown", "copy"]) dialog.addEventListener(event, (e) => e.stopPropagation())
    document.body.append(dialog)
    dialog.showModal()
    dialog.scrollTop = 0 // the focus, on the button, scrolls a long report to its end
}

/** The element of a node's box. */
function newElement() {
    const element = document.createElement("div")
    element.className = "qwen-l40s-box"
    const text = document.createElement("div")
    element.append(text)
    // Here the pointer selects text instead of dragging the node; the wheel scrolls a long text.
    element.addEventListener("pointerdown", (e) => e.button === 0 && e.stopPropagation())
    element.addEventListener("wheel", (e) => {
        if (text.scrollHeight > text.clientHeight) e.stopPropagation()
        else if (!window.LiteGraph?.vueNodesMode) app.canvas.processMouseWheel(e)
    })
    return element
}

/** The height that an element needs in a node of this width. */
function heightOf(element, width) {
    const measured = element.cloneNode(true)
    // The page gives a shown element the height of its parent, here the window.
    measured.style.cssText = `position: absolute; visibility: hidden; width: ${width}px; height: auto`
    document.body.append(measured)
    const height = Math.min(measured.scrollHeight, MOST_HEIGHT)
    measured.remove()
    return height
}

/** The widget that holds a node's box; later texts reuse it. */
function boxOf(node, said) {
    const widget = node.widgets?.find((widget) => widget.name === BOX)
    if (widget) return widget
    const added = node.addDOMWidget(BOX, BOX, newElement(), {
        serialize: false,
        hideInPanel: true,
        hideOnZoom: false,
        margin: MARGIN,
        getValue: () => said.error ?? said.summary,
        getMinHeight: () => said.height,
    })
    added.serialize = false
    return added
}

/** Updates a node's box; without a text there is no box. */
function show(node, news) {
    const said = Object.assign(saidBy.get(node) ?? { grown: 0 }, news)
    saidBy.set(node, said)
    failed[said.error ? "add" : "delete"](node)
    const text = said.error ?? said.summary
    // The page leaves less room around widgets than computeSize, where it made the node higher itself.
    const closer = Math.max(0, node.computeSize()[1] - node.size[1])
    if (text) {
        const { element } = boxOf(node, said)
        element.classList.toggle("error", Boolean(said.error))
        element.firstChild.textContent = text
        element.querySelector("button")?.remove()
        if (said.report && !said.error) {
            const details = document.createElement("button")
            details.textContent = say("Details")
            details.onclick = () => showReport(node.title, said.report)
            element.append(details)
        }
        said.height = heightOf(element, node.size[0] - 2 * MARGIN) + 2 * MARGIN
    } else {
        const old = node.widgets?.find((widget) => widget.name === BOX)
        if (old) node.removeWidget(old)
    }
    const [width, height] = [node.size[0], node.size[1] - said.grown]
    said.grown = text ? Math.max(0, node.computeSize()[1] - closer - height) : 0
    node.setSize([width, height + said.grown])
    node.setDirtyCanvas(true, true)
}

/** Shows what a run, or the page's record of one, says of a node. */
function ran(node, output) {
    if (!isOurs(node) || !output?.[BOX]) return
    const report = output.text?.join("\n")
    const did = Boolean(output.qwen_l40s_did)
    const { planned } = saidBy.get(node) ?? {}
    // Of a node that is cached, ComfyUI sends again what it will do, after the sampler.
    if (!did && report === planned && saidBy.get(node).did) return show(node, { error: undefined })
    const news = { summary: output[BOX].join("\n"), report, error: undefined, did }
    show(node, did ? news : { ...news, planned: report })
}

/** Shows why a node was refused or failed; without a reason, its last summary again. */
function fails(node, error) {
    if (isOurs(node)) show(node, { error })
}

/** The sentence of one validation error, without what ComfyUI puts before ours. */
function sentence({ type, message, details = "", extra_info }) {
    if (type.startsWith("exception_during_")) return details // raised by the node
    const before = `${extra_info?.input_name} - `
    if (type === "custom_validation_failed" && details.startsWith(before))
        return details.slice(before.length)
    return details ? `${message}: ${details}` : message
}

/** Shows what the server's answer to a prompt says of its nodes. */
function answered(errors) {
    // One problem of two inputs comes twice.
    const said = ({ errors }) => [...new Set(errors.map(sentence))].join("\n")
    for (const [id, found] of Object.entries(errors ?? {})) fails(nodeOf(id), said(found))
}

/**
 * Takes away what an older prompt left, before a new one goes out: it may fail before its answer is here.
 * A node of another tab has a number that a node of this tab has, too: Nodes 2.0 would give that one its size.
 */
function forgetErrors() {
    const shown = (node) => (node.graph?.rootGraph ?? node.graph) === (app.graph.rootGraph ?? app.graph)
    for (const node of [...failed]) shown(node) ? fails(node, undefined) : failed.delete(node)
}

/** Gives the inputs of a saved node the names of today, before the page drops what it lacks. */
function renameInputs(saved) {
    if (!saved.type.startsWith(OURS)) return
    const { required, optional } = LiteGraph.registered_node_types[saved.type]?.nodeData?.input ?? {}
    for (const [name, [, about]] of Object.entries({ ...required, ...optional })) {
        const older = about?.older_name
        const input = older && saved.inputs?.find((each) => each.name === older)
        if (input) Object.assign(input, { name, widget: { name } })
    }
}

/** Gives the values of a loaded node the names of today. */
function renameValues(node) {
    const { required, optional } = node.constructor.nodeData.input
    for (const [name, [, about]] of Object.entries({ ...required, ...optional })) {
        const widget = node.widgets?.find((widget) => widget.name === name)
        const today = about?.older?.[widget?.value]
        if (today !== undefined) widget.value = today
    }
}

/** Shows the choices of a node under their labels; a prompt and a saved graph keep their names. */
function labelChoices(node) {
    const { required, optional } = node.constructor.nodeData.input
    for (const [name, [, about]] of Object.entries({ ...required, ...optional })) {
        const widget = about?.labels && node.widgets?.find((widget) => widget.name === name)
        if (widget) widget.options.getOptionLabel = (value) => about.labels[value] ?? value ?? ""
    }
}

/** Leaves the room of a picture free before a run; the page gives it to a text area. */
function keepTextAreasLow(node) {
    for (const { element, options } of node.widgets ?? [])
        if (element?.tagName === "TEXTAREA") options.getMaxHeight = () => MOST_TEXT_AREA
}

/** Fills in %date:…% and %Node.widget%, which the page does for a list of ComfyUI's own nodes. */
function fillInName(node) {
    const widget = node.widgets?.find((widget) => widget.name === "filename_prefix")
    if (!widget) return
    const { applyTextReplacements } = window.comfyAPI.utils
    widget.serializeValue = () => applyTextReplacements(app.graph, String(widget.value))
}

/**
 * Brings all of the graph into view, between the page's bars. The page itself leaves a quarter of the
 * window free, and letters are too small to read.
 */
function fit() {
    const { canvas } = app
    const { graph, ds } = canvas
    const boxes = [...graph.nodes, ...graph.groups].map((item) => item.boundingRect)
    if (!boxes.length) return
    const [left, top] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])))
    const [right, bottom] = [0, 1].map((axis) =>
        Math.max(...boxes.map((box) => box[axis] + box[axis + 2])))
    const { width, height } = canvas.canvas.getBoundingClientRect()
    const room = [width - LEFT - RIGHT, height - TOP - BOTTOM]
    ds.scale = Math.min(1, room[0] / (right - left), room[1] / (bottom - top))
    ds.offset[0] = (LEFT + room[0] / 2) / ds.scale - (left + right) / 2
    ds.offset[1] = TOP / ds.scale - top
    canvas.setDirty(true, true)
}

/** Runs an action for the page; its errors go to the console. */
function safely(action) {
    try {
        action()
    } catch (error) {
        console.warn("Qwen-Image Accelerator:", error)
    }
}

app.registerExtension({
    name: "QwenL40S.Face",

    setup() {
        const style = document.createElement("style")
        style.textContent = STYLE
        document.head.append(style)
        const locale = app.extensionManager.setting.get("Comfy.Locale")
        if (locale !== "en") api.fetchApi("/i18n").then((answer) => answer.json()).then(
            (found) => { words = found[locale]?.qwenL40S ?? {} }, () => {})
        api.addEventListener("execution_error", ({ detail }) =>
            safely(() => fails(nodeOf(detail.node_id), detail.exception_message.trim()))
        )
        // The page has no event for a refused prompt.
        const { queuePrompt } = api
        api.queuePrompt = function (...all) {
            safely(forgetErrors)
            const answer = queuePrompt.apply(this, all)
            answer.then(
                ({ node_errors }) => safely(() => answered(node_errors)),
                (error) => safely(() => answered(error.response?.node_errors))
            )
            return answer
        }
    },

    beforeRegisterNodeDef(nodeType, nodeData) {
        if (!nodeData.name.startsWith(OURS)) return
        const { onExecuted } = nodeType.prototype
        nodeType.prototype.onExecuted = function (output) {
            onExecuted?.apply(this, arguments)
            safely(() => ran(this, output))
        }
    },

    nodeCreated(node) {
        if (!isOurs(node)) return
        safely(() => fillInName(node))
        safely(() => labelChoices(node))
        safely(() => keepTextAreasLow(node))
    },

    // The page opened another tab, and remembers what its nodes said.
    onNodeOutputsUpdated(outputs) {
        for (const [id, output] of Object.entries(outputs)) safely(() => ran(nodeOf(id), output))
    },

    beforeConfigureGraph(graph) {
        for (const saved of graph.nodes ?? []) safely(() => renameInputs(saved))
    },

    loadedGraphNode(node) {
        if (isOurs(node)) safely(() => renameValues(node))
    },

    afterConfigureGraph() {
        const { extra } = app.graph
        if (!extra?.qwen_l40s?.fit) return
        // Once: what is saved from now on opens where its user left it.
        delete extra.qwen_l40s
        safely(() => dress(app.graph))
        fit()
        // The newer page looks at all of the graph once more, when it has drawn it.
        requestAnimationFrame(() => requestAnimationFrame(fit))
    },
})
