// A dashboard with Grafana's own panels, without a Grafana server: DATA has the dashboard, and the answers of Prometheus
// by panel. The packages have curves alone: a state timeline is drawn as curves in steps, a table as plain HTML.
import 'uplot/dist/uPlot.min.css';
import { applyNullInsertThreshold, createTheme, dateTime, FieldType, getDisplayProcessor, toDataFrame } from '@grafana/data';
import { GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import infoCircle from './node_modules/@grafana/ui/dist/public/img/icons/unicons/info-circle.svg';

const { dashboard, answers, range, step_s, width } = window.DATA;
const [ROW_HEIGHT, COLUMNS, PHONE, PADDING] = [38, 24, 769, 4];
const theme = createTheme({ colors: { mode: 'light' } });
const ends = { from: dateTime(range.from), to: dateTime(range.to) };
const timeRange = { ...ends, raw: ends };

window.fetch = async () => new Response(infoCircle, { headers: { 'Content-Type': 'image/svg+xml' } }); // the only icon

// Grafana's Prometheus data source shows no point for NaN and infinities.
const gap = { interval: 1500 * step_s }; // and no line across a missing point, of a process that is down
const finite = (value) => (Number.isFinite(Number(value)) ? Number(value) : null);

function curves({ id, type, fieldConfig: { defaults } }) {
  const custom = { lineWidth: 1, lineInterpolation: type === 'state-timeline' ? 'stepAfter' : 'linear', ...defaults.custom };
  return answers[id]
    .filter(({ values }) => values.some(([, value]) => finite(value) !== null))
    .map(({ legend, values }, seriesIndex) => {
      const config = { ...defaults, displayName: legend, color: { mode: 'palette-classic' }, custom };
      const times = { name: 'Time', type: FieldType.time, values: values.map(([time]) => 1000 * time), config: gap };
      const numbers = { name: 'Value', type: FieldType.number, values: values.map(([, value]) => finite(value)), config };
      const frame = applyNullInsertThreshold({ frame: toDataFrame({ fields: [times, numbers] }) });
      for (const field of frame.fields) {
        field.state = { seriesIndex };
        field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
      }
      return frame;
    });
}

function Labels({ id }) {
  const rows = answers[id].map(({ metric }) => metric);
  const names = [...new Set(rows.flatMap(Object.keys))];
  const line = (cells) => <tr>{cells.map((cell, index) => <td key={index} style={{ padding: 4 }}>{cell}</td>)}</tr>;
  return (
    <table>
      <thead>{line(names)}</thead>
      {rows.map((labels, index) => <tbody key={index}>{line(names.map((name) => labels[name]))}</tbody>)}
    </table>
  );
}

function Content({ panel, width, height }) {
  if (panel.type === 'table') return <Labels id={panel.id} />;
  const frames = curves(panel);
  if (!frames.length) return <div className="no-data">No data</div>;
  const legend = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [] };
  return <TimeSeries {...{ frames, timeRange, width, height, legend }} timeZone="utc" options={{}} />;
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const isPhone = width < PHONE;
  const place = isPhone ? {} : { position: 'absolute', left: (x * width) / COLUMNS, top: y * ROW_HEIGHT };
  const inside = { width: (isPhone ? width : (w * width) / COLUMNS) - 2 * PADDING, height: h * ROW_HEIGHT - 2 * PADDING };
  return (
    <div className="panel" style={{ ...place, padding: PADDING }}>
      <PanelChrome title={panel.title} description={panel.description} {...inside}>
        {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} />}
      </PanelChrome>
    </div>
  );
}

function Dashboard() {
  const bottom = Math.max(...dashboard.panels.map(({ gridPos: { y, h } }) => y + h));
  const height = width < PHONE ? 'auto' : bottom * ROW_HEIGHT;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative', width, height }}>
        {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')).render(<Dashboard />);
